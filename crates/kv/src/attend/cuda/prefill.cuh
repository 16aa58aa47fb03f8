// What the two kinds of warps of prefill.cu share, and those that feed: they read records or plain tiles and write x_hat to shared
// memory. What is defined from outside, and how rows lie in shared memory: prefill.cu.
#pragma once
#include "plan.cuh"
#include "record.cuh"
#include "warpgroup.cuh"
using namespace record;

#define FULL 0xffffffffu

// Rows at positions first .. first + tokens - 1, all of the same edge.
struct RowTile {
    u32 first, tokens;
};

struct Params {
    const u8* records;  // pages of records: [page][kv_head][group of page]
    const u8* pages;    // pages of plain tiles: [page][kv_head][tile of page] (K_BITS 16)
    const u8* scratch;  // plain tiles from scratch_first on: [kv_head][scratch_tiles]
    const u8* sinks;    // one tile: [slot][kv_head]
    const u16* q;       // f16 [rows][q_heads][head_dim]
    void* out;          // the same shape
    const float* sink_logits;  // f32 [q_heads], null: none
    const RowTile* tiles;      // [row_tiles], by position
    const u32* table;          // page numbers: [slot][table_len]
    float* partials;           // [row_tiles][kv_heads][splits][PARTIAL], splits > 1
    u32* counters;             // [row_tiles][kv_heads], 0 between launches
    Rule rule;
    u32 row_tiles, kv_heads, ratio, splits;
    u32 begin;          // position of row 0
    u32 first_visible;
    u32 slot, table_len, groups_of_page, tiles_of_page;
    u32 scratch_first, scratch_tiles;
    float scale;    // of scores, times log2(e)
    float softcap;  // times log2(e)
};
static_assert(sizeof(Params) == PARAMS_BYTES, "as the launcher has it (prefill.rs)");

constexpr int FEEDERS = 4;
constexpr int ROWS = WARPS * 16;
constexpr int BLOCKS = STAGE / 32;  // of 32 tokens, one or two
constexpr int K_CHUNK = STAGE * 16 + 32, V_CHUNK = CHANNELS * 16 + 32;
constexpr int K_STAGE = CHANNELS / 8 * K_CHUNK, V_STAGE = STAGE / 8 * V_CHUNK;
// Queries of wide heads are read from shared memory: wgmma: [4 warps][chunk][row], mma: [warp][slice][lane], rows of 16 bytes.
constexpr bool Q_SHARED = CHANNELS > (WGMMA ? 128 : 96);
constexpr int Q_BYTES = Q_SHARED ? ROWS * CHANNELS * 2 : 0;
constexpr int SHARED_BYTES = SLOTS * (K_STAGE + V_STAGE) + Q_BYTES + ROWS * 8 + SLOTS * 32 + 16;
static_assert(SHARED_BYTES == SHARED, "as the launcher has it (prefill.rs)");
constexpr int SUMS = CHANNELS / 2;  // results of a thread
constexpr int PARTIAL = WARPS * 32 * (SUMS + 4);
// A feeding lane holds codes of so many slices at once.
constexpr int PIECES = SLICES > 8 ? 2 : 1, PIECE = SLICES / PIECES;
constexpr float NOTHING = -1e30f;
constexpr u32 NOBODY = 0xffffffffu;
// Weights are 2^LIFT times themselves: f16 holds the small ones as normal numbers.
constexpr float LIFT = 10.0f;

// Reads in this order, before the wait that follows; parameters may be read whenever the compiler likes.
DEVICE uint4 read4(const u8* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE uint2 read2(const u8* p) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
DEVICE uint4 parameters(const u8* p, int bits) { return PIECES == 1 && bits < 8 ? __ldg((const uint4*)p) : read4(p); }
DEVICE void store_shared4(u32 a, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// What a block works on.
struct Work {
    u32 first, last;  // positions of its rows
    u32 low;          // first position that any of them sees
    u32 edge, sinks;
    u32 kv_head;
    u32 begin, end;   // stages
};

// Shared memory: stages, then barriers: full and empty ones of keys, then of values.
struct Ring {
    u32 keys, values, q, rows, barriers, notes;
    DEVICE_MEMBER u32 keys_at(u32 k) const { return keys + k % SLOTS * K_STAGE; }
    DEVICE_MEMBER u32 values_at(u32 k) const { return values + k % SLOTS * V_STAGE; }
    DEVICE_MEMBER u32 full(u32 side, u32 k) const { return barriers + side * SLOTS * 16 + k % SLOTS * 16; }
    DEVICE_MEMBER u32 empty(u32 side, u32 k) const { return full(side, k) + 8; }
    static DEVICE_MEMBER u32 parity(u32 k) { return k / SLOTS & 1; }
};

// ---- Decoding ----

// Words of a tile pair's codes in a lane's registers: [step][tile][EACH], a step being the slices that share a word.
template <int BITS, int PIECE_NUMBER>
struct Coding {
    static constexpr int STEP = BITS == 2 ? 2 : BITS == 3 ? 4 : 1, EACH = BITS == 8 ? 2 : BITS == 3 ? 3 : 1;
    static constexpr int WORDS = words_of(BITS), PIECE_WORDS = WORDS / PIECES, HELD = PIECE_WORDS / TILES * 2;
    static constexpr int tile_of(int word) { return word / EACH % TILES; }
    static constexpr bool in(int word, int pair) { return word / PIECE_WORDS == PIECE_NUMBER && tile_of(word) / 2 == pair; }
    static constexpr bool wide(int word, int pair) { return word % 4 == 0 && word + 4 <= WORDS && in(word, pair) && in(word + 2, pair); }
    static constexpr int at(int word, int tile) {
        return (word / EACH / TILES * 2 + tile + tile_of(word) % 2) * EACH + word % EACH - PIECE_NUMBER * HELD;
    }
    static constexpr int at_slice(int slice, int tile) { return (slice / STEP * 2 + tile) * EACH - PIECE_NUMBER * HELD; }

    // Those of pair PAIR of a part, as tile `tile` and up.
    template <int PAIR>
    static DEVICE_MEMBER void read_part(u32* w, const u8* codes, int tile, u32 lane) {
#pragma unroll
        for (int n = 0; n < WORDS; n += 2) {
            if (!in(n, PAIR) || (n % 4 == 2 && wide(n - 2, PAIR))) continue;
            const u8* from = codes + word_at(WORDS, n, 0) + lane * (n < WORDS / 4 * 4 ? 16 : 8);
            if (wide(n, PAIR)) {
                const uint4 v = read4(from);
                w[at(n, tile)] = v.x, w[at(n + 1, tile)] = v.y, w[at(n + 2, tile)] = v.z, w[at(n + 3, tile)] = v.w;
            } else {
                const uint2 v = read2(from);
                w[at(n, tile)] = v.x, w[at(n + 1, tile)] = v.y;
            }
        }
    }
    // Tiles `tile` and tile + 1 of a part, or (parts of one tile) of it and the next one.
    static DEVICE_MEMBER void read(u32* w, const u8* codes, u32 tile, u32 lane) {
        if (TILES == 1) read_part<0>(w, codes, 0, lane), read_part<0>(w, codes + PART_BYTES, 1, lane);
        else if (TILES == 2 || tile == 0) read_part<0>(w, codes, 0, lane);
        else read_part<1>(w, codes, 0, lane);
    }
};

// x_hat of two codes as unpack() leaves them. With the exponent of 1024 or-ed in, code * 2^place is 1024 less than the number.
DEVICE u32 decode(u32 u, int place, u32 scale, u32 zero) {
    const u32 one = 0x3c00u - (u32)place * 0x400u, less = 0x8000u | (25u - (u32)place) * 0x400u;
    return fma2(fma2(u | 0x64006400u, pair(one), pair(less)), scale, zero);
}

// Where a feeding lane writes: its first row of keys, its first of values, of 32 tokens `b` of a stage.
#if WGMMA
DEVICE u32 key_row(u32 b, u32 g) { return b * 32 + g / 2 * 8 + g % 2; }
constexpr u32 key_rows(int tile, int s) { return tile * 4 + s * 2; }
#else
DEVICE u32 key_row(u32 b, u32 g) { return b * 32 + g; }
constexpr u32 key_rows(int tile, int s) { return tile * 16 + s * 8; }
#endif

// x / d for x * d < 2^32, without the many instructions of a division.
struct Divisor {
    u32 d, inverse;
    DEVICE_MEMBER explicit Divisor(u32 d) : d(d), inverse(FULL / d + 1) {}
    DEVICE_MEMBER u32 of(u32 x) const { return d == 1 ? x : __umulhi(x, inverse); }
};

// Some slices of two plain tiles.
constexpr int PLAIN_PIECE = SLICES == 8 ? 4 : 2, PLAIN_PIECES = SLICES / PLAIN_PIECE;
struct Plain {
    uint4 x[2][PLAIN_PIECE];
};

struct Feeder {
    const Params& p;
    const Work& work;
    const Ring& ring;
    u32 lane, g, t;
    Divisor of_page;  // tiles, or groups, of a page

    DEVICE_MEMBER u32 page(u32 number) const { return __ldg(p.table + (u64)p.slot * p.table_len + number); }

    // A plain tile, null if none of its tokens is seen.
    DEVICE_MEMBER const u8* plain(u32 tile) const {
        if (tile * 16 > work.last || tile * 16 + 16 <= work.low) return nullptr;
#if K_BITS == 16
        const u32 number = of_page.of(tile);
        const u64 pages = (u64)page(number) * p.kv_heads + work.kv_head;
        return p.pages + (pages * p.tiles_of_page + tile - number * p.tiles_of_page) * TILE_BYTES;
#else
        return p.scratch + ((u64)work.kv_head * p.scratch_tiles + tile - p.scratch_first / 16) * TILE_BYTES;
#endif
    }

    // Reads keys (side 0) or values of a plain block of 32 tokens; zeros for a tile that is not seen.
    template <int SIDE>
    DEVICE_MEMBER void read_plain(Plain& x, const u8* const* from, int piece) const {
#pragma unroll
        for (int tile = 0; tile < 2; tile++)
#pragma unroll
            for (int i = 0; i < PLAIN_PIECE; i++) {
                x.x[tile][i] = make_uint4(0, 0, 0, 0);
                if (from[tile]) x.x[tile][i] = read4(from[tile] + SIDE * TILE_HALF_BYTES + (piece * PLAIN_PIECE + i) * 512 + lane * 16);
            }
    }
    // Writes them. Values behind the last row are made zero: their weights are, but what was never written may be no number.
    template <int SIDE>
    DEVICE_MEMBER void write_plain(Plain& x, u32 first, int piece, u32 to) const {
        if (SIDE == 0) {
#pragma unroll
            for (int i = 0; i < PLAIN_PIECE; i += 2)
#pragma unroll
                for (int tile = 0; tile < 2; tile++) {
                    const uint4 a = x.x[tile][i], b = x.x[tile][i + 1];
                    const u32 at = to + (piece * PLAIN_PIECE + i) * 2 * K_CHUNK;
                    store_shared4(at + key_rows(tile, 0) * 16, a.x, a.z, b.x, b.z);
                    store_shared4(at + key_rows(tile, 1) * 16, a.y, a.w, b.y, b.w);
                }
            return;
        }
        if (first + 32 > work.last + 1) {
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int s = 0; s < 2; s++) {
                    const u32 token = first + tile * 16 + s * 8 + t * 2;
                    const u32 keep = token + 1 <= work.last ? FULL : token <= work.last ? 0xffffu : 0;
#pragma unroll
                    for (int i = 0; i < PLAIN_PIECE; i++) {
                        if (s == 0) x.x[tile][i].x &= keep, x.x[tile][i].y &= keep;
                        else x.x[tile][i].z &= keep, x.x[tile][i].w &= keep;
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < PLAIN_PIECE; i++) {
            const u32 at = to + (piece * PLAIN_PIECE + i) * 256;
            store_shared4(at, x.x[0][i].x, x.x[0][i].z, x.x[1][i].x, x.x[1][i].z);
            store_shared4(at + 128, x.x[0][i].y, x.x[0][i].w, x.x[1][i].y, x.x[1][i].w);
        }
    }

#if K_BITS != 16
    DEVICE_MEMBER const u8* record_of(u32 first) const {
        const u32 group = first / GROUP_LEN, number = of_page.of(group);
        const u64 pages = (u64)page(number) * p.kv_heads + work.kv_head;
        return p.records + (pages * p.groups_of_page + group - number * p.groups_of_page) * RECORD_BYTES;
    }
    DEVICE_MEMBER bool packed(u32 first) const { return first < work.edge && first + 32 > work.low; }
    static DEVICE_MEMBER const u8* part_of(const u8* record, u32 first) {
        return record + K_PARAM_BYTES + first % GROUP_LEN / PART_LEN * PART_BYTES;
    }
    // Reads the codes of a packed block.
    template <int SIDE, int NUMBER>
    DEVICE_MEMBER void read_packed(u32* w, const u8* record, u32 first) const {
        Coding<SIDE == 0 ? K_BITS : V_BITS, NUMBER>::read(w, part_of(record, first) + SIDE * K_CODE_BYTES, first / 16 % TILES, lane);
    }
    // Reads a word of each sector of its parameters, so that they are in L1 when its turn comes; for nothing else.
    template <int SIDE>
    DEVICE_MEMBER u32 touch_parameters(const u8* record, u32 first) const {
        const u8* from = SIDE == 0 ? record : part_of(record, first) + K_CODE_BYTES + V_CODE_BYTES;
        constexpr u32 SECTORS = (SIDE == 0 ? K_PARAM_BYTES : V_PARAM_BYTES) / 32;
        if (SIDE == 1 && TILES == 1 && lane >= 16) from += PART_BYTES - 16 * 32;
        u32 x = 0;
        if (SIDE == 1 && TILES == 1 ? lane % 16 < SECTORS : lane < SECTORS)
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from + lane * 32));
        return x;
    }
    // Sinks take the place of their tokens' codes: each lane mends the rows that it wrote.
    template <int SIDE>
    DEVICE_MEMBER void put_sinks(u32 to) const {
        const u8* from = p.sinks + ((u64)p.slot * p.kv_heads + work.kv_head) * TILE_BYTES + SIDE * TILE_HALF_BYTES + lane * 16;
#pragma unroll 1
        for (u32 i = 0; i < SLICES; i += 2, from += 1024) {
            const uint4 x = read4(from), y = read4(from + 512);
            if (SIDE == 0) {
                const u32 at = to + i * 2 * K_CHUNK;
                if (g < work.sinks) store_shared4(at + key_rows(0, 0) * 16, x.x, x.z, y.x, y.z);
                if (g + 8 < work.sinks) store_shared4(at + key_rows(0, 1) * 16, x.y, x.w, y.y, y.w);
            } else {
                const u32 rows[4][2] = {{x.x, x.z}, {x.y, x.w}, {y.x, y.z}, {y.y, y.w}};
#pragma unroll
                for (int n = 0; n < 4; n++)
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        const u32 token = t * 2 + s * 8, mask = token + 1 < work.sinks ? FULL : token < work.sinks ? 0xffffu : 0;
                        const u32 at = to + i * 256 + n * 128 + s * 4;
                        store_shared(at, (load_shared(at) & ~mask) | (rows[n][s] & mask));
                    }
            }
        }
    }
    template <int SIDE, int NUMBER>
    DEVICE_MEMBER void write_packed(const u32* w, const u8* record, u32 first, u32 to) const {
        constexpr int BITS = SIDE == 0 ? K_BITS : V_BITS, FROM = NUMBER * PIECE;
        using Codes = Coding<BITS, NUMBER>;
        if (SIDE == 0) {
#pragma unroll
            for (int i = FROM; i < FROM + PIECE; i += 2) {
                const uint4 pa = parameters(record + (i * 4 + t) * 16, BITS), pb = parameters(record + (i * 4 + 4 + t) * 16, BITS);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const Tile a = unpack<BITS>(w + Codes::at_slice(i, n), i), b = unpack<BITS>(w + Codes::at_slice(i + 1, n), i + 1);
#pragma unroll
                    for (int s = 0; s < 2; s++) {
                        u32 row[4];
#pragma unroll
                        for (int q = 0; q < 2; q++) {
                            row[q] = decode(a.u[s][q], place(BITS, i, q), q ? pa.y : pa.x, q ? pa.w : pa.z);
                            row[2 + q] = decode(b.u[s][q], place(BITS, i + 1, q), q ? pb.y : pb.x, q ? pb.w : pb.z);
                        }
                        store_shared4(to + i * 2 * K_CHUNK + key_rows(n, s) * 16, row[0], row[1], row[2], row[3]);
                    }
                }
            }
        } else {
            constexpr int GROUP_PARAMS = V_GROUPS * 64;
            const u8* params = part_of(record, first) + K_CODE_BYTES + V_CODE_BYTES + first / 16 % TILES * GROUP_PARAMS + t * 16;
            uint4 v[2];
#pragma unroll
            for (int i = FROM; i < FROM + PIECE; i++) {
                if (i == FROM || v_group(i) != v_group(i - 1)) {
                    v[0] = parameters(params + v_group(i) * 64, BITS);
                    v[1] = parameters(params + v_group(i) * 64 + (TILES == 1 ? PART_BYTES : GROUP_PARAMS), BITS);
                }
                u32 row[2][4];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const Tile a = unpack<BITS>(w + Codes::at_slice(i, n), i);
#pragma unroll
                    for (int s = 0; s < 2; s++)
#pragma unroll
                        for (int q = 0; q < 2; q++)
                            row[q][n * 2 + s] = decode(a.u[s][q], place(BITS, i, q), s ? v[n].y : v[n].x, s ? v[n].w : v[n].z);
                }
                store_shared4(to + i * 256, row[0][0], row[0][1], row[0][2], row[0][3]);
                store_shared4(to + i * 256 + 128, row[1][0], row[1][1], row[1][2], row[1][3]);
            }
        }
    }
#endif

    // Two warps feed a side, each its 32 tokens of every stage. What comes next is read before what is there is written.
    template <int SIDE>
    DEVICE_MEMBER void run(u32 half) const {
        constexpr int BITS = SIDE == 0 ? K_BITS : V_BITS;
        const u32 stages = work.end - work.begin;
        auto first_of = [&](u32 k) { return (work.begin + k) * STAGE + half * 32; };
        auto to_of = [&](u32 k) {
            const u32 keys = ring.keys_at(k) + t * K_CHUNK + key_row(half, g) * 16, values = ring.values_at(k) + (half * 4 + t) * V_CHUNK;
            return SIDE == 0 ? keys : values + g * 16;
        };
        auto wait = [&](u32 k) { phase_wait(ring.empty(SIDE, k), ring.parity(k) ^ 1); };
        auto done = [&](u32 k) {
#if WGMMA
            fence_copy_engine();
#endif
            __syncwarp();
            if (lane == 0) phase_arrive(ring.full(SIDE, k));
        };
        if (half >= BLOCKS || stages == 0) return;
#if K_BITS == 16
        Plain x;
        const u8* from[2] = {plain(first_of(0) / 16), plain(first_of(0) / 16 + 1)};
        read_plain<SIDE>(x, from, 0);
#pragma unroll 1
        for (u32 k = 0; k < stages; k++) {
            const u32 first = first_of(k), to = to_of(k);
#pragma unroll
            for (int piece = 0; piece < PLAIN_PIECES; piece++) {
                Plain next;
                if (piece + 1 == PLAIN_PIECES) from[0] = plain((first + STAGE) / 16), from[1] = plain((first + STAGE) / 16 + 1);
                read_plain<SIDE>(next, from, (piece + 1) % PLAIN_PIECES);
                if (piece == 0) wait(k);
                write_plain<SIDE>(x, first, piece, to);
                x = next;
            }
            done(k);
        }
#else
        constexpr int HELD = Coding<BITS, 0>::HELD;
        // Where registers are short, nothing is read ahead.
        constexpr bool AHEAD = PIECES == 1 && HELD <= 16, TOUCH = PIECES == 1 || (WGMMA && BITS != 3 && GROUP_LEN == 64);
        u32 w[HELD], touched = 0;
        const u8* record = packed(first_of(0)) ? record_of(first_of(0)) : nullptr;
        if (AHEAD && record) read_packed<SIDE, 0>(w, record, first_of(0));
#pragma unroll 1
        for (u32 k = 0; k < stages; k++) {
            const u32 first = first_of(k), to = to_of(k);
            // Of this and the next stage, null if they are not packed.
            if (!AHEAD && !TOUCH) record = packed(first) ? record_of(first) : nullptr;
            const u8* next = (AHEAD || TOUCH) && k + 1 < stages && packed(first + STAGE) ? record_of(first + STAGE) : nullptr;
            if (record) {
                u32 w_next[HELD], x = 0;
                if (AHEAD && next) read_packed<SIDE, 0>(w_next, next, first + STAGE);
                if (!AHEAD) read_packed<SIDE, 0>(w, record, first);
                if (TOUCH && next) x = touch_parameters<SIDE>(next, first + STAGE);
                wait(k);
                write_packed<SIDE, 0>(w, record, first, to);
                if (PIECES == 2) {
                    read_packed<SIDE, PIECES - 1>(w, record, first);
                    write_packed<SIDE, PIECES - 1>(w, record, first, to);
                }
                if (first < work.sinks) put_sinks<SIDE>(to);
                done(k);
                touched ^= x;
#pragma unroll
                for (int i = 0; i < HELD; i++)
                    if (AHEAD) w[i] = w_next[i];
            } else {
                const u8* from[2] = {plain(first / 16), plain(first / 16 + 1)};
                Plain x;
                read_plain<SIDE>(x, from, 0);
                wait(k);
#pragma unroll 1
                for (int piece = 0; piece < PLAIN_PIECES; piece++) {
                    if (piece > 0) read_plain<SIDE>(x, from, piece);
                    write_plain<SIDE>(x, first, piece, to);
                }
                if (AHEAD && next) read_packed<SIDE, 0>(w, next, first + STAGE);
                done(k);
            }
            record = next;
        }
        // Never true, which the compiler does not know.
        if (touched & p.row_tiles >> 31) store_shared(ring.notes, touched);
#endif
    }
};
