"""The structs, functions and constants of the package match crossdock.h. Needs no library."""
import ctypes
import importlib
import pathlib
import re
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "crossdock"
NOT_BOUND = {"group_from_callbacks"}  # the callbacks must be written in C
HEADERS_NOT_BOUND = {"mesh.h", "sequence.h"}  # lists of ranks and tokens: C and C++ only


def load(name):
    """A module of the package without its __init__, which loads the library."""
    if "abi_only" not in sys.modules:
        package = types.ModuleType("abi_only")
        package.__path__ = [str(PACKAGE)]
        sys.modules["abi_only"] = package
    return importlib.import_module(f"abi_only.{name}")


abi = load("_abi")
abi_layer = load("_abi_layer")


def header_text():
    parts = sorted((ROOT / "include/crossdock/c").glob("*.h"))
    files = [ROOT / "include/crossdock/crossdock.h", *(part for part in parts if part.name not in HEADERS_NOT_BOUND)]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r"//[^\n]*", "", text)


HEADER = header_text()


def camel(name):
    return "".join(word.capitalize() for word in name.split("_"))


def struct_class(name):
    for module in (abi, abi_layer):
        for spelling in (camel(name), "C" + camel(name)):
            if hasattr(module, spelling):
                return getattr(module, spelling)
    return None


def structs():
    """(name, [(type, field, length)]) of each struct in the headers."""
    for body, name in re.findall(r"typedef struct crossdock_\w+ \{(.*?)\} crossdock_(\w+);", HEADER, re.S):
        fields = []
        for line in body.split(";"):
            line = " ".join(line.split())
            function = re.match(r"\w+ \(\*(\w+)\)\(", line)
            if function:
                fields.append(("function", function.group(1), None))
                continue
            plain = re.match(r"(?:const )?(?:struct )?(\w+)( ?\*)? ?(\w+)(?:\[(\d+)\])?$", line)
            if plain:
                kind, star, field, length = plain.groups()
                fields.append((kind + "*" if star else kind, field, int(length) if length else None))
            else:
                assert not line, f"crossdock_{name}: cannot read {line!r}"
        yield name, fields


STRUCTS = {name: fields for name, fields in structs() if name not in ("communicator", "wait")}
NUMBERS = {
    "size_t": ctypes.c_size_t,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
}


def is_pointer(kind):
    return kind in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(kind, (ctypes._Pointer, ctypes._CFuncPtr))


def matches(declared, kind, length):
    if length is not None:
        return declared is NUMBERS[kind] * length
    if kind == "function" or kind.endswith("*"):
        return is_pointer(declared)
    if kind in NUMBERS:
        return declared is NUMBERS[kind]
    name = {"crossdock_expert_gradients": "crossdock_expert_weights"}.get(kind, kind)
    return declared is struct_class(name[len("crossdock_"):])


def test_the_header_has_structs():
    assert len(STRUCTS) >= 25


@pytest.mark.parametrize("name", sorted(STRUCTS))
def test_a_struct_has_the_fields_of_the_header(name):
    declared = struct_class(name)
    assert declared is not None, f"crossdock_{name} is missing"
    assert [field for field, _ in declared._fields_] == [field for _, field, _ in STRUCTS[name]]
    for (field, kind), (c_kind, _, length) in zip(declared._fields_, STRUCTS[name]):
        assert matches(kind, c_kind, length), f"crossdock_{name}.{field}: {kind} is not {c_kind}"


def functions():
    for result, name, arguments in re.findall(r"CROSSDOCK_C_API\s+([\w\s*]+?)\s*crossdock_(\w+)\(([^)]*)\)", HEADER):
        letters = [letter_of(result)]
        if arguments.strip() != "void":
            letters += [letter_of(re.sub(r"\w+$", "", argument.strip())) for argument in arguments.split(",")]
        yield name, " ".join(letters)


def letter_of(kind):
    kind = " ".join(kind.split())
    if kind in ("const char *", "const char*"):
        return "s"
    if "*" in kind:
        return "p"
    return {"void": "v", "crossdock_status": "i", "int32_t": "i", "int64_t": "l", "double": "d"}[kind]


def test_functions_are_those_of_the_header():
    in_header = dict(functions())
    assert len(in_header) >= 55
    assert set(abi.FUNCTIONS) == set(in_header) - NOT_BOUND
    assert abi.FUNCTIONS == {name: in_header[name] for name in abi.FUNCTIONS}


def constants():
    for body in re.findall(r"enum \{(.*?)\}", HEADER, re.S):
        for name, value in re.findall(r"CROSSDOCK_(\w+) = (\d+)", body):
            yield name, int(value)


def test_dtypes_are_those_of_the_header():
    in_header = dict(constants())
    dtypes = load("_dtype").DType
    assert {member.name: int(member) for member in dtypes} == {member.name: in_header[member.name] for member in dtypes}
    assert len(dtypes) == in_header["BOOL"]


@pytest.mark.parametrize(
    "file, name, prefix",
    [
        ("_dispatcher", "DROP_POLICIES", "DROP_BY_"),
        ("_dispatcher", "NONFINITE", "NONFINITE_"),
        ("_experts", "ACTIVATIONS", ""),
        ("_experts", "WEIGHTS_IN", "WEIGHTS_IN_"),
        ("_layer", "SCORES", ""),
        ("_layer", "GROUP_SCORES", "GROUP_"),
        ("_layer", "AUX_LOSS_SCOPES", "BALANCE_"),
    ],
)
def test_words_stand_for_the_constants_of_the_header(file, name, prefix):
    source = (PACKAGE / f"{file}.py").read_text()
    values = eval(re.search(rf"^{name} = (\{{.*?\}})", source, re.M | re.S).group(1))
    in_header = dict(constants())
    assert values == {word: in_header[prefix + word.upper()] for word in values}


def test_error_codes_are_those_of_the_header():
    source = (PACKAGE / "_errors.py").read_text()
    codes = dict(re.findall(r"^    ([A-Z_]+) = (\d+)", source, re.M))
    in_header = dict(constants())
    assert len(codes) == 10
    assert {name: int(value) for name, value in codes.items()} == {name: in_header[name] for name in codes}
