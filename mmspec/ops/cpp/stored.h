// Rows of weights in GGUF files: consecutive blocks of 32 weights, or 256 in K formats. Fields:
// https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h

#pragma once

#include <unistd.h>

#include <vector>

#include "formats.h"
#include "pool.h"

namespace {

enum class Stored : int64_t { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4, Q4_K, Q5_K, Q6_K };

constexpr Kind stored_kind[] = {INT4, INT4, Q5, Q5, INT8, MXFP4, Q4_K, Q5_K, Q6_K};
constexpr int64_t stored_bytes[] = {18, 20, 22, 24, 34, 17, 144, 176, 210};  // bytes per block

constexpr bool is_super(Stored format) { return format >= Stored::Q4_K; }

constexpr int64_t row_bytes(Stored format, int64_t groups) {
  return groups / (is_super(format) ? 8 : 1) * stored_bytes[int64_t(format)];
}

// A group of a row: codes in the kernels' layout and two 16-bit numbers: scale and value of code 0 (float16), or in K
// formats two factors (uint8) and nothing; of MXFP4 an exponent.
struct Stored32 {
  uint8_t codes[GROUP];
  uint16_t first, second;
};

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

inline float from_half(uint16_t half) {
  if (!is_finite(half)) return NAN;
  uint32_t bits = uint32_t(half & 0x8000) << 16 | uint32_t(half & 0x7fff) << 13;
  return load<float>(&bits) * 0x1p112f;
}

// -2^power times a float16.
inline uint16_t minus_power(uint16_t half, int power) {
  uint16_t size = half & 0x7fff;
  for (; power > 0; power--) size = std::min(size < 0x400 ? size << 1 : size + 0x400, 0x7c00);
  return size | (~half & 0x8000);
}

template <Stored format>
inline Stored32 stored_group(const uint8_t* row, int64_t group) {
  constexpr int64_t size = stored_bytes[int64_t(format)];
  const uint8_t* block = row + (is_super(format) ? group / 8 : group) * size;
  int64_t place = group % 8;
  Stored32 out;
  if constexpr (format == Stored::Q8_0) {
    out.first = load<uint16_t>(block), out.second = 0;
    for (int i = 0; i < 32; i++) out.codes[i] = block[2 + i] ^ 128;
  } else if constexpr (format == Stored::MXFP4) {
    out.first = block[0], out.second = 0;
    for (int i = 0; i < 16; i++) out.codes[i] = block[1 + i] & 15, out.codes[16 + i] = block[1 + i] >> 4;
  } else if constexpr (format == Stored::Q6_K) {
    const uint8_t *low = block + place / 4 * 64 + place % 2 * 32, *high = block + 128 + place / 4 * 32;
    int nibble = place % 4 / 2 * 4, pair = place % 4 * 2;
    for (int i = 0; i < 32; i++) out.codes[i] = (low[i] >> nibble & 15) | (high[i] >> pair & 3) << 4;
    out.first = load<uint16_t>(block + 192 + 2 * place), out.second = 0;
  } else if constexpr (is_super(format)) {
    const uint8_t *factors = block + 4, *low = block + size - 128 + place / 2 * 32;
    int nibble = place % 2 * 4;
    for (int i = 0; i < 32; i++) out.codes[i] = low[i] >> nibble & 15;
    if constexpr (format == Stored::Q5_K)
      for (int i = 0; i < 32; i++) out.codes[i] |= (block[16 + i] >> place & 1) << 4;
    int scale = factors[place] & 63, offset = factors[place + 4] & 63;
    if (place >= 4) {
      scale = (factors[place + 4] & 15) | factors[place - 4] >> 6 << 4;
      offset = factors[place + 4] >> 4 | factors[place] >> 6 << 4;
    }
    out.first = scale | offset << 8, out.second = 0;
  } else {
    constexpr bool fifth = format == Stored::Q5_0 || format == Stored::Q5_1;
    constexpr bool centred = format == Stored::Q4_0 || format == Stored::Q5_0;
    const uint8_t* low = block + size - 16;
    for (int i = 0; i < 16; i++) out.codes[i] = low[i] & 15, out.codes[16 + i] = low[i] >> 4;
    if constexpr (fifth) {
      uint32_t bits = load<uint32_t>(low - 4);
      for (int i = 0; i < 32; i++) out.codes[i] |= (bits >> i & 1) << 4;
    }
    out.first = load<uint16_t>(block);
    out.second = centred ? minus_power(out.first, fifth ? 4 : 3) : load<uint16_t>(block + 2);
  }
  return out;
}

// d and dmin of a group's superblock; for Q6_K, both are d.
template <Stored format>
inline std::pair<uint16_t, uint16_t> stored_shared(const uint8_t* row, int64_t group) {
  const uint8_t* block = row + group / 8 * stored_bytes[int64_t(format)];
  if constexpr (format == Stored::Q6_K) return {load<uint16_t>(block + 208), load<uint16_t>(block + 208)};
  return {load<uint16_t>(block), load<uint16_t>(block + 2)};
}

template <Stored format>
void dense_row(const uint8_t* row, int64_t groups, float* out) {
  for (int64_t g = 0; g < groups; g++, out += GROUP) {
    Stored32 group = stored_group<format>(row, g);
    float first = from_half(group.first), second = first, low = from_half(group.second);
    int centre = format == Stored::Q4_0 ? 8 : format == Stored::Q5_0 ? 16 : format == Stored::Q8_0 ? 128 : 0;
    if constexpr (format == Stored::MXFP4) {
      first = second = mxfp4_scale(uint8_t(group.first)), centre = MXFP4_CENTRE;
      for (uint8_t& code : group.codes) code = MXFP4_VALUES[code];
    }
    if constexpr (is_super(format)) {
      auto [d, dmin] = stored_shared<format>(row, g);
      int a = group.first & 255, b = group.first >> 8;
      if constexpr (format == Stored::Q6_K) {
        first = from_half(d) * int8_t(a), second = from_half(d) * int8_t(b), centre = 32;
      } else {
        first = second = from_half(d) * a, low = -(from_half(dmin) * b);
      }
    }
    bool offset = !centre;
    for (int i = 0; i < 16; i++) {
      float x = first * (int(group.codes[i]) - centre), y = second * (int(group.codes[16 + i]) - centre);
      out[i] = offset ? x + low : x, out[16 + i] = offset ? y + low : y;
    }
  }
}

// Writes a block in the kernels' layout from up to 16 rows; null rows are zeros. Returns whether all scales are finite.
template <Stored format>
bool pack_block(const uint8_t* const* rows, int64_t groups, uint8_t* block) {
  constexpr Kind kind = stored_kind[int64_t(format)];
  constexpr int64_t stride = together[kind] * (code_bytes[kind] + scale_bytes[kind]) + shared_bytes[kind];
  if (groups % together[kind]) std::memset(block + groups / together[kind] * stride, 0, stride);
  bool finite = true;
  for (int64_t g = 0; g < groups; g++) {
    int64_t place = g % together[kind];
    uint8_t* start = block + g / together[kind] * stride;
    uint8_t *codes = start + place * code_bytes[kind], *end = start + together[kind] * code_bytes[kind];
    uint8_t* scales = end + place * scale_bytes[kind];
    alignas(64) uint8_t vectors[8][64];
    for (int64_t lane = 0; lane < BLOCK; lane++) {
      Stored32 group = rows[lane] ? stored_group<format>(rows[lane], g) : Stored32{};
      for (int i = 0; i < 8; i++) std::memcpy(&vectors[i][4 * lane], &group.codes[4 * i], 4);
      if constexpr (kind == MXFP4) scales[lane] = uint8_t(group.first);
      else std::memcpy(scales + 2 * lane, &group.first, 2);
      if constexpr (kind == INT4 || kind == Q5) std::memcpy(scales + 2 * (BLOCK + lane), &group.second, 2);
      if constexpr (!is_super(format)) finite = finite && is_finite(group.first) && is_finite(group.second);
      if constexpr (is_super(format)) {
        if (place) continue;
        auto [d, dmin] = rows[lane] ? stored_shared<format>(rows[lane], g) : std::pair<uint16_t, uint16_t>{};
        finite = finite && is_finite(d) && is_finite(dmin);
        uint8_t* shared = end + together[kind] * scale_bytes[kind];
        std::memcpy(shared + 2 * lane, &d, 2), std::memcpy(shared + 2 * (BLOCK + lane), &dmin, 2);
      }
    }
    if constexpr (kind == INT8) {
      std::memcpy(codes, vectors, sizeof vectors);
      continue;
    }
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 64; j++) codes[64 * i + j] = (vectors[2 * i][j] & 15) | (vectors[2 * i + 1][j] & 15) << 4;
    constexpr int high = int(code_bytes[kind] - 256) / 64, count = high ? 8 / std::max(high, 1) : 0;
    for (int plane = 0; plane < high; plane++)
      for (int j = 0; j < 64; j++) {
        uint8_t bits = 0;
        for (int i = 0; i < count; i++) bits |= vectors[plane * count + i][j] >> 4 << (i * high);
        codes[256 + 64 * plane + j] = bits;
      }
  }
  return finite;
}

// Locations of rows: addresses, or offsets in a file.
struct Places {
  const int64_t* places;
  int64_t count, bytes;
  int file;  // -1: none

  // Addresses of rows from ``first`` on, null beyond the last; returns false if the file is too short.
  bool at(int64_t first, int64_t wanted, std::vector<uint8_t>& read, const uint8_t** rows) const {
    int64_t have = std::min(wanted, count - first);
    std::fill(rows + have, rows + wanted, nullptr);
    if (file < 0) {
      for (int64_t i = 0; i < have; i++) rows[i] = reinterpret_cast<const uint8_t*>(places[first + i]);
      return true;
    }
    read.resize(wanted * bytes);
    for (int64_t i = 0, next; i < have; i = next) {
      for (next = i + 1; next < have && places[first + next] == places[first + next - 1] + bytes;) next++;
      uint8_t* to = read.data() + i * bytes;
      for (int64_t left = (next - i) * bytes, from = places[first + i]; left > 0;) {
        int64_t got = pread(file, to, left, from);
        if (got <= 0) return false;
        to += got, from += got, left -= got;
      }
    }
    for (int64_t i = 0; i < have; i++) rows[i] = read.data() + i * bytes;
    return true;
  }
};

// Calls body(first row, addresses of 16 rows) for all rows; returns false if the file is too short.
template <class Body>
bool each_block(const Places& rows, const Body& body) {
  std::atomic<bool> whole{true};
  each((rows.count + BLOCK - 1) / BLOCK, BLOCK * rows.bytes, [&](int64_t index) {
    thread_local std::vector<uint8_t> read;
    const uint8_t* addresses[BLOCK];
    if (!rows.at(index * BLOCK, BLOCK, read, addresses)) return whole.store(false);
    body(index * BLOCK, addresses);
  });
  return whole;
}

template <class Body>
bool with_format(Stored format, const Body& body) {
  switch (format) {
    case Stored::Q4_0: return body(std::integral_constant<Stored, Stored::Q4_0>{});
    case Stored::Q4_1: return body(std::integral_constant<Stored, Stored::Q4_1>{});
    case Stored::Q5_0: return body(std::integral_constant<Stored, Stored::Q5_0>{});
    case Stored::Q5_1: return body(std::integral_constant<Stored, Stored::Q5_1>{});
    case Stored::Q8_0: return body(std::integral_constant<Stored, Stored::Q8_0>{});
    case Stored::MXFP4: return body(std::integral_constant<Stored, Stored::MXFP4>{});
    case Stored::Q4_K: return body(std::integral_constant<Stored, Stored::Q4_K>{});
    case Stored::Q5_K: return body(std::integral_constant<Stored, Stored::Q5_K>{});
    default: return body(std::integral_constant<Stored, Stored::Q6_K>{});
  }
}

}  // namespace
