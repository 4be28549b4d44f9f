#pragma once

#include <gtest/gtest.h>

#include <cstddef>

#include "crossdock/crossdock.h"

// Sizes and offsets of the C API's structs on 64-bit machines are frozen. A struct may only grow at
// its end: then only its size here changes.

#define EXPECT_SIZE(type, size) EXPECT_EQ(sizeof(type), size##U) << #type
#define EXPECT_FIELD(type, field, offset) \
  EXPECT_EQ(offsetof(type, field), offset##U) << #type "." #field

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8, "written for 64-bit machines");
