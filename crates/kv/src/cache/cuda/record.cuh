// Records as the GPU's kernels read them: the same codes, scales and zeros as docs/layout.md has for the CPU, in the order in
// which a warp's matrix instructions want them. layout.rs beside this file is the same map in Rust; docs/layout.md shows it.
//
// Defined from outside: HEAD_DIM, GROUP_LEN, K_BITS, V_BITS (16: no records, plain rows only).
//
// A record holds one kv head's group of GROUP_LEN tokens:
//   key parameters | part 0 | part 1 | ...           a part is of PART_LEN = 16 * TILES tokens:
//                                                    key codes | value codes | value parameters
// Codes lie in tiles of 16 x 16: keys [16 tokens][16 channels of a slice], values [16 channels of a slice][16 tokens]. Lane
// (g, t) = (lane / 4, lane % 4) of a warp holds 8 codes of a tile, u[s][q][h] with s, q, h in {0, 1}:
//   keys:   token g + 8 s, channel 4 t + 2 q + h of the slice
//   values: channel g + 8 q of the slice, token 2 t + 8 s + h
// so that u[.][.] are the registers of mma's left operand. h is the half of a register, the other two are bits of a word:
//   4 bits: one word a tile:              16 h + 8 s + 4 q
//   8 bits: word q of two:                16 h + 8 s
//   2 bits: one word a pair of slices (f: which):  16 h + 8 s + 4 f + 2 q
//   3 bits: three words four slices (l: which pair, f: which of it): the lower two bits as with 2 bits in word l, the upper one in
//           word 2 at                     16 h + 8 l + s + 2 (2 f + q)
// Masked out of its word, a code stands at bit p of its half: read as an f16 that is a subnormal number, code * 2^(p - 24). No
// instruction converts it; the powers of two go into the query (keys) and the result (values).
#pragma once
#include "ptx.cuh"

namespace record {

// Slices of 16 channels, an even number: heads of 80 channels have 16 channels of zeros behind them.
constexpr int SLICES = (HEAD_DIM + 31) / 32 * 2;
constexpr int CHANNELS = SLICES * 16;
constexpr int LANES = 32;

constexpr int tiles_of(int bits) {
    int tiles = 4;
    while (tiles > 1 && (tiles * 2 * CHANNELS * bits > 4096 || tiles * 16 > GROUP_LEN)) tiles /= 2;
    return tiles;
}
// Tiles of 16 tokens in a part: about 4 KB of codes, at most a group.
constexpr int TILES = K_BITS == 16 ? 1 : tiles_of(K_BITS + V_BITS);
constexpr int PART_LEN = 16 * TILES;
constexpr int PARTS = GROUP_LEN / PART_LEN;

// Words of a lane for the codes of a part.
constexpr int words_of(int bits) {
    return bits == 2 ? SLICES / 2 * TILES : bits == 3 ? 3 * TILES * ((SLICES + 3) / 4) : bits == 4 ? SLICES * TILES : 2 * SLICES * TILES;
}
constexpr int K_WORDS = K_BITS == 16 ? 0 : words_of(K_BITS);
constexpr int V_WORDS = V_BITS == 16 ? 0 : words_of(V_BITS);
static_assert(K_WORDS % 2 == 0 && V_WORDS % 2 == 0, "words come in fours, a last two may be alone");

constexpr int V_GROUP_LEN = GROUP_LEN < HEAD_DIM ? GROUP_LEN : HEAD_DIM;
constexpr int V_GROUPS = (HEAD_DIM + V_GROUP_LEN - 1) / V_GROUP_LEN;
// The value group of a slice; channels behind the head are in the last one.
constexpr int v_group(int slice) { return slice * 16 / V_GROUP_LEN < V_GROUPS ? slice * 16 / V_GROUP_LEN : V_GROUPS - 1; }

// Key parameters: for each slice and t: scale f16 x 4, zero f16 x 4 of channels 4 t .. 4 t + 3.
constexpr int K_PARAM_BYTES = K_BITS == 16 ? 0 : SLICES * 4 * 16;
constexpr int K_CODE_BYTES = K_WORDS * LANES * 4;
constexpr int V_CODE_BYTES = V_WORDS * LANES * 4;
// Value parameters: for each tile, value group and t: scale f16 x 4, zero f16 x 4 of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
constexpr int V_PARAM_BYTES = V_BITS == 16 ? 0 : TILES * V_GROUPS * 4 * 16;
constexpr int PART_BYTES = K_CODE_BYTES + V_CODE_BYTES + V_PARAM_BYTES;
constexpr int RECORD_BYTES = K_PARAM_BYTES + PARTS * PART_BYTES;

// Which bit of its half a code stands at, once masked out.
constexpr int place(int bits, int slice, int q) { return bits == 8 ? 0 : bits == 4 ? 4 * q : 4 * (slice % 2) + 2 * q; }

// The word of a part that holds codes of tile `tile` and this slice: the first one, when there are several.
constexpr int word_of(int bits, int slice, int tile) {
    return bits == 2 ? slice / 2 * TILES + tile : bits == 3 ? (slice / 4 * TILES + tile) * 3 : bits == 4 ? slice * TILES + tile : (slice * TILES + tile) * 2;
}

// Where a lane's word lies in the codes of a part: words in fours, so that a lane reads 16 bytes at once.
constexpr u32 word_at(int words, int word, int lane) {
    return word < words / 4 * 4 ? word / 4 * 512 + lane * 16 + word % 4 * 4 : words / 4 * 512 + lane * 8 + word % 4 * 4;
}

// Plain rows lie in tiles of 16 tokens, keys then values, each in the order of the same operands: 16 bytes a slice and lane.
constexpr int TILE_LEN = 16;
constexpr int TILE_HALF_BYTES = SLICES * LANES * 16;
constexpr int TILE_BYTES = 2 * TILE_HALF_BYTES;
// Where a key (value) of a tile lies: its token (0..16) and channel.
constexpr u32 tile_key_at(int token, int channel) {
    return channel / 16 * 512 + (token % 8 * 4 + channel % 16 / 4) * 16 + (channel % 4 / 2 * 2 + token / 8) * 4 + channel % 2 * 2;
}
constexpr u32 tile_value_at(int token, int channel) {
    return TILE_HALF_BYTES + channel / 16 * 512 + (channel % 8 * 4 + token % 8 / 2) * 16 + (token / 8 * 2 + channel % 16 / 8) * 4 + token % 2 * 2;
}

// The words of a part's codes for one lane, read in order from shared memory: call get for word 0, 1, 2, ...; `word` is a
// constant once loops are unrolled.
template <int WORDS>
struct Words {
    u32 codes;
    u32 lane;
    u32 four[4];
    DEVICE_MEMBER u32 get(int word) {
        if (word % 4 == 0) {
            if (word + 4 <= WORDS) {
                uint4 v = load_shared4(codes + word_at(WORDS, word, 0) + lane * 16);
                four[0] = v.x, four[1] = v.y, four[2] = v.z, four[3] = v.w;
            } else {
                uint2 v = load_shared2(codes + word_at(WORDS, word, 0) + lane * 8);
                four[0] = v.x, four[1] = v.y;
            }
        }
        return four[word % 4];
    }
};

// The four registers u[s][q] of one tile, each a pair of subnormal f16.
struct Tile {
    u32 u[2][2];
};
constexpr u32 pair(u32 mask) { return mask | mask << 16; }

template <int BITS>
DEVICE Tile unpack(const u32* word, int slice) {
    Tile tile;
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int p = place(BITS, slice, q);
            if (BITS == 8) {
                tile.u[s][q] = (word[q] >> 8 * s) & pair(0xff);
            } else if (BITS == 4) {
                tile.u[s][q] = (word[0] >> 8 * s) & pair(0xf << p);
            } else if (BITS == 2) {
                tile.u[s][q] = (word[0] >> 8 * s) & pair(3 << p);
            } else {
                const int l = slice / 2 % 2, move = 8 * l + s - 2;
                const u32 high = move < 0 ? word[2] << -move : word[2] >> move;
                tile.u[s][q] = ((word[l] >> 8 * s) & pair(3 << p)) | (high & pair(4 << p));
            }
        }
    return tile;
}

}  // namespace record
