// CRC-32, as zlib's, by the CPU's instructions for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moegraft {

std::uint32_t crc32(const std::byte* data, std::size_t bytes);

}  // namespace moegraft
