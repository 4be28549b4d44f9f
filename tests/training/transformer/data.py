"""Bytes to learn, packed into rows. Every rank makes the same batches, starting at the given document."""
import random
import zlib
from typing import List, Optional

from shards import Row


class GeneratedDocuments:
    """Documents of unequal length, made of few words, each with few successors. Some have only one byte and so no
    token."""

    def __init__(self, seed: int, longest: int):
        self.seed, self.longest = seed, longest
        generator = random.Random(f"words {seed}")
        self.words = ["".join(generator.choices("abcdefgh", k=generator.randint(2, 5))) for _ in range(16)]
        self.successors = {word: generator.sample(self.words, 2) for word in self.words}

    def document(self, index: int) -> bytes:
        generator = random.Random(f"{self.seed} {index}")
        length = generator.randint(1, self.longest)
        word = generator.choice(self.words)
        text = word
        while len(text) < length:
            word = generator.choice(self.successors[word])
            text += " " + word
        return text[:length].encode()


class FileDocuments:
    """Paragraphs of a file, starting over after the last."""

    def __init__(self, path: str):
        with open(path, "rb") as file:
            paragraphs = [paragraph.strip() for paragraph in file.read().split(b"\n\n")]
        self.paragraphs = [paragraph for paragraph in paragraphs if len(paragraph) > 1]
        if not self.paragraphs:
            raise ValueError(f"{path} must have a paragraph of at least two bytes")

    def document(self, index: int) -> bytes:
        return self.paragraphs[index % len(self.paragraphs)]


class Loader:
    """Packs documents, in order, into micro-batches of rows of at most `length` tokens.

    `position`, the number of the next document, is all that a checkpoint needs. With vary_rows a micro-batch has 1 to
    `rows` rows, so that some data-parallel ranks have no token.
    """

    def __init__(
        self, path: Optional[str], *, seed: int, rows: int, length: int, micro_batches: int, vary_rows: bool = False
    ):
        self.documents = FileDocuments(path) if path else GeneratedDocuments(seed, length * 3 // 4)
        self.rows, self.length, self.micro_batches, self.vary_rows = rows, length, micro_batches, vary_rows
        self.position = 0

    def next_step(self) -> List[List[Row]]:
        return [self._micro_batch() for _ in range(self.micro_batches)]

    def _micro_batch(self) -> List[Row]:
        rows = 1 + zlib.crc32(str(self.position).encode()) % self.rows if self.vary_rows else self.rows
        return [self._row() for _ in range(rows)]

    def _row(self) -> Row:
        row, room = [], self.length
        while True:
            document = self.documents.document(self.position)[: self.length + 1]
            if len(document) - 1 > room:
                return row
            row.append(document)
            room -= len(document) - 1
            self.position += 1
