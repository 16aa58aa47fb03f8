// Prefill attention: rows of one sequence at consecutive positions, over packed history and plain tiles.
//
// Defined from outside: HEAD_DIM GROUP_LEN K_BITS V_BITS (record.cuh; K_BITS 16: every key is plain), WGMMA (1: sm_90a), WARPS
// (that multiply; 16 rows each), STAGE (tokens), SLOTS (stages in flight), SOFTCAP (0, 1), OUT_BF16 (0: f32).
//
// A block takes the rows of a row tile (some tokens, all query heads of one kv head; row = token * ratio + head) and walks the
// keys that they see in stages of STAGE tokens, which begin at multiples of STAGE. FEEDERS warps decode: they read records or
// plain tiles and write x_hat, rounded to f16, to shared memory; WARPS warps multiply. Every 32 tokens of a stage are packed or
// plain as a whole, since the edge is a multiple of the group; sinks take their tokens' places in the first 16. So those who multiply
// see keys by position only. Stages of keys and of values are handed over apart, by barriers.
//
// In shared memory, rows of 16 bytes, such that a lane's registers of two tiles are whole rows (no transpose, no conflicts):
//   keys    [slice pair][t] chunks of [token]: channels 4 t .. 4 t + 3 of both slices. The order of channels is q's too.
//   values  [32 tokens][t] chunks of [channel]: tokens 2 t, 2 t + 1, + 8, + 16, + 24 of the 32
// Chunks are 32 bytes apart in banks. wgmma takes weights as it left the scores: lane t has columns 8 j + 2 t + h, and k 8 j + 2 t + h
// of the value product is token 8 t + 2 j + h; so key rows are put in that order: row 8 j + 2 t + h holds token 8 t + 2 j + h. With mma
// the order of tokens is their own.
//
// Softmax as usual: a running maximum of each row, so that a row's result depends on its own keys only (when no keys are split).
#include "plan.cuh"
#include "../../cache/cuda/record.cuh"
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

constexpr int FEEDERS = 4;
constexpr int ROWS = WARPS * 16;
constexpr int BLOCKS = STAGE / 32;  // of 32 tokens
constexpr int K_CHUNK = STAGE * 16 + 32, V_CHUNK = CHANNELS * 16 + 32;
constexpr int K_STAGE = CHANNELS / 8 * K_CHUNK, V_STAGE = STAGE / 8 * V_CHUNK;
// Queries of wide heads are read from shared memory: wgmma: [4 warps][chunk][row], mma: [warp][slice][lane], rows of 16 bytes.
constexpr bool Q_SHARED = CHANNELS > (WGMMA ? 128 : 96);
constexpr int Q_BYTES = Q_SHARED ? ROWS * CHANNELS * 2 : 0;
constexpr int SHARED_BYTES = SLOTS * (K_STAGE + V_STAGE) + Q_BYTES + ROWS * 8 + SLOTS * 32 + 16;
constexpr int SUMS = CHANNELS / 2;  // results of a thread
constexpr int PARTIAL = WARPS * 32 * (SUMS + 4);
// A feeding lane holds codes of so many slices at once.
constexpr int PIECES = SLICES > 8 ? 2 : 1, PIECE = SLICES / PIECES, PLAIN_PIECE = SLICES > 8 ? 4 : SLICES;
constexpr float NOTHING = -1e30f;
constexpr u32 NOBODY = 0xffffffffu;
// Weights are 2^LIFT times themselves: f16 holds the small ones as normal numbers.
constexpr float LIFT = 10.0f;

// Registers a thread of each kind.
#ifdef FEED_REGISTERS
#elif HEAD_DIM > 128
#define FEED_REGISTERS 88
#define MULTIPLY_REGISTERS 208
#else
#define FEED_REGISTERS 104
#define MULTIPLY_REGISTERS 200
#endif

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
DEVICE uint4 parameters(const u8* p) { return PIECES == 1 ? __ldg((const uint4*)p) : read4(p); }
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

// Words read ahead: one of 32 bytes a lane, 1024 bytes at once.
constexpr int touches(int bytes) { return (bytes + 1023) / 1024; }
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr bool TOUCH_PLAIN = K_BITS == 16 || SLICES <= 8;  // else registers are short
constexpr int TOUCHES = most(TOUCH_PLAIN ? 2 * TILE_HALF_BYTES / 1024 : 0, touches(K_PARAM_BYTES) + 2 * touches(most(K_CODE_BYTES, V_CODE_BYTES + V_PARAM_BYTES)));
struct Touched {
    u32 word[TOUCHES];
};

struct Feeder {
    const Params& p;
    const Work& work;
    const Ring& ring;
    u32 lane, g, t;

    DEVICE_MEMBER u32 page(u32 number) const { return __ldg(p.table + (u64)p.slot * p.table_len + number); }

    // A plain tile, null if none of its tokens is seen.
    DEVICE_MEMBER const u8* plain(u32 tile) const {
        if (tile * 16 > work.last || tile * 16 + 16 <= work.low) return nullptr;
#if K_BITS == 16
        return p.pages + (((u64)page(tile / p.tiles_of_page) * p.kv_heads + work.kv_head) * p.tiles_of_page + tile % p.tiles_of_page) * TILE_BYTES;
#else
        return p.scratch + ((u64)work.kv_head * p.scratch_tiles + tile - p.scratch_first / 16) * TILE_BYTES;
#endif
    }

    // Writes keys (side 0) or values of a plain or an unseen block of 32 tokens at `first`, some slices at once. Values behind the
    // last row are made zero: their weights are, but what was never written may be no number.
    template <int SIDE>
    DEVICE_MEMBER void plain_block(u32 k, u32 first, u32 to) const {
        const u8* from[2] = {plain(first / 16), plain(first / 16 + 1)};
#pragma unroll 1
        for (int begin = 0; begin < SLICES; begin += PLAIN_PIECE) {
            uint4 x[2][PLAIN_PIECE];
#pragma unroll
            for (int tile = 0; tile < 2; tile++)
#pragma unroll
                for (int i = 0; i < PLAIN_PIECE; i++) {
                    x[tile][i] = make_uint4(0, 0, 0, 0);
                    if (from[tile] && begin + i < SLICES) x[tile][i] = read4(from[tile] + SIDE * TILE_HALF_BYTES + (begin + i) * 512 + lane * 16);
                }
            if (begin == 0) phase_wait(ring.empty(SIDE, k), ring.parity(k) ^ 1);
            if (SIDE == 0) {
#pragma unroll
                for (int i = 0; i < PLAIN_PIECE; i += 2)
#pragma unroll
                    for (int tile = 0; tile < 2; tile++) {
                        const uint4 a = x[tile][i], b = x[tile][i + 1];
                        const u32 at = to + (begin + i) * 2 * K_CHUNK;
                        store_shared4(at + key_rows(tile, 0) * 16, a.x, a.z, b.x, b.z);
                        store_shared4(at + key_rows(tile, 1) * 16, a.y, a.w, b.y, b.w);
                    }
            } else {
                if (first + 32 > work.last + 1) {
#pragma unroll
                    for (int tile = 0; tile < 2; tile++)
#pragma unroll
                        for (int s = 0; s < 2; s++) {
                            const u32 token = first + tile * 16 + s * 8 + t * 2;
                            const u32 keep = token + 1 <= work.last ? FULL : token <= work.last ? 0xffffu : 0;
#pragma unroll
                            for (int i = 0; i < PLAIN_PIECE; i++) {
                                if (s == 0) x[tile][i].x &= keep, x[tile][i].y &= keep;
                                else x[tile][i].z &= keep, x[tile][i].w &= keep;
                            }
                        }
                }
#pragma unroll
                for (int i = 0; i < PLAIN_PIECE; i++) {
                    const u32 at = to + (begin + i) * 256;
                    store_shared4(at, x[0][i].x, x[0][i].z, x[1][i].x, x[1][i].z);
                    store_shared4(at + 128, x[0][i].y, x[0][i].w, x[1][i].y, x[1][i].w);
                }
            }
        }
    }

#if K_BITS != 16
    DEVICE_MEMBER const u8* record_of(u32 first) const {
        const u32 group = first / GROUP_LEN;
        const u64 pages = (u64)page(group / p.groups_of_page) * p.kv_heads + work.kv_head;
        return p.records + (pages * p.groups_of_page + group % p.groups_of_page) * RECORD_BYTES;
    }
    // The same of a packed block.
    template <int SIDE>
    DEVICE_MEMBER void packed_block(u32 k, u32 first, u32 to) const {
        const u8* record = record_of(first);
        packed_piece<SIDE, 0>(k, record, first % GROUP_LEN / 16, to);
        if (PIECES == 2) packed_piece<SIDE, PIECES - 1>(k, record, first % GROUP_LEN / 16, to);
        if (first < work.sinks) put_sinks<SIDE>(to);
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
    DEVICE_MEMBER void packed_piece(u32 k, const u8* record, u32 tile, u32 to) const {
        constexpr int BITS = SIDE == 0 ? K_BITS : V_BITS, FROM = NUMBER * PIECE;
        using Codes = Coding<BITS, NUMBER>;
        const u8* part = record + K_PARAM_BYTES + tile / TILES * PART_BYTES;
        u32 w[Codes::HELD];
        Codes::read(w, part + SIDE * K_CODE_BYTES, tile % TILES, lane);
        if (NUMBER == 0) phase_wait(ring.empty(SIDE, k), ring.parity(k) ^ 1);
        if (SIDE == 0) {
#pragma unroll
            for (int i = FROM; i < FROM + PIECE; i += 2) {
                const uint4 pa = parameters(record + (i * 4 + t) * 16), pb = parameters(record + (i * 4 + 4 + t) * 16);
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
            const u8* params = part + K_CODE_BYTES + V_CODE_BYTES + tile % TILES * GROUP_PARAMS + t * 16;
            uint4 v[2];
#pragma unroll
            for (int i = FROM; i < FROM + PIECE; i++) {
                if (i == FROM || v_group(i) != v_group(i - 1)) {
                    v[0] = parameters(params + v_group(i) * 64);
                    v[1] = parameters(params + v_group(i) * 64 + (TILES == 1 ? PART_BYTES : GROUP_PARAMS));
                }
                u32 row[2][4];
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const Tile a = unpack<BITS>(w + Codes::at_slice(i, n), i);
#pragma unroll
                    for (int s = 0; s < 2; s++)
#pragma unroll
                        for (int q = 0; q < 2; q++) row[q][n * 2 + s] = decode(a.u[s][q], place(BITS, i, q), s ? v[n].y : v[n].x, s ? v[n].w : v[n].z);
                }
                store_shared4(to + i * 256, row[0][0], row[0][1], row[0][2], row[0][3]);
                store_shared4(to + i * 256 + 128, row[1][0], row[1][1], row[1][2], row[1][3]);
            }
        }
    }
#endif

    // Reads one word of each sector of a block, so that it is in L1 when its turn comes. The words are used for nothing, later.
    template <int SIDE>
    DEVICE_MEMBER void touch(Touched& x, u32 first) const {
        int n = 0;
        auto read = [&](const u8* from, int bytes) {
#pragma unroll
            for (int at = 0; at < bytes; at += 1024, n++)
                if (at + (int)lane * 32 < bytes) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x.word[n]) : "l"(from + at + lane * 32));
        };
#if K_BITS != 16
        if (first < work.edge && first + 32 > work.low) {
            const u8* from = record_of(first);
            if (SIDE == 0) read(from, K_PARAM_BYTES);
            from += K_PARAM_BYTES + first % GROUP_LEN / PART_LEN * PART_BYTES + SIDE * K_CODE_BYTES;
            read(from, SIDE == 0 ? K_CODE_BYTES : V_CODE_BYTES + V_PARAM_BYTES);
            if (TILES == 1) read(from + PART_BYTES, SIDE == 0 ? K_CODE_BYTES : V_CODE_BYTES + V_PARAM_BYTES);
            return;
        }
#endif
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            if (TOUCH_PLAIN && plain(first / 16 + i)) read(plain(first / 16 + i) + SIDE * TILE_HALF_BYTES, TILE_HALF_BYTES);
            else if (TOUCH_PLAIN) n += TILE_HALF_BYTES / 1024;
    }

    // Two warps feed a side, each its blocks of every stage.
    template <int SIDE>
    DEVICE_MEMBER void run(u32 half) const {
        u32 all = 0;
        for (u32 k = 0; k < work.end - work.begin; k++) {
            if (half >= BLOCKS) phase_wait(ring.empty(SIDE, k), ring.parity(k) ^ 1);
#pragma unroll 1
            for (u32 b = half; b < BLOCKS; b += 2) {
                const u32 first = (work.begin + k) * STAGE + b * 32;
                Touched next;
#pragma unroll
                for (int i = 0; i < TOUCHES; i++) next.word[i] = 0;
                if (k + 1 < work.end - work.begin) touch<SIDE>(next, first + STAGE);
                const u32 to = SIDE == 0 ? ring.keys_at(k) + t * K_CHUNK + key_row(b, g) * 16 : ring.values_at(k) + (b * 4 + t) * V_CHUNK + g * 16;
#if K_BITS != 16
                if (first < work.edge && first + 32 > work.low) packed_block<SIDE>(k, first, to);
                else
#endif
                    plain_block<SIDE>(k, first, to);
#pragma unroll
                for (int i = 0; i < TOUCHES; i++) all ^= next.word[i];
            }
#if WGMMA
            fence_copy_engine();
#endif
            __syncwarp();
            if (lane == 0) phase_arrive(ring.full(SIDE, k));
        }
        // Never true, which the compiler does not know.
        if (all & p.row_tiles >> 31) store_shared(ring.notes, all);
    }
};

// ---- Multiplying ----

// Two rows of a thread: g and g + 8 of its warp's 16. Their positions, and where they lie in q and out, are kept in shared memory.
struct Rows {
    float m[2], sum[2];  // what is subtracted from scores (the maximum less LIFT); this thread's sum of weights
};

// Scores of keys that a row does not see are no scores. first: position of the stage.
DEVICE void mask(float* s, const Params& p, u32 row, u32 first, u32 t) {
    const float none = __int_as_float(0xff800000);
    u32 position[2], low[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        position[i] = load_shared(row + i * 64);
        low[i] = first_seen(p.rule, position[i], p.first_visible);
    }
#pragma unroll
    for (int j = 0; j < STAGE / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
#if WGMMA
            const u32 token = first + j / 4 * 32 + t * 8 + j % 4 * 2 + h;
#else
            const u32 token = first + j * 8 + t * 2 + h;
#endif
#pragma unroll
            for (int i = 0; i < 2; i++)
                if (token > position[i] || token < low[i]) s[j * 4 + i * 2 + h] = none;
        }
}

DEVICE void cap_scores(float* s, float scale, float cap) {
#pragma unroll
    for (int i = 0; i < STAGE / 2; i++) {
        // tanh(x) = 1 - 2 / (1 + e^(2x)); scores are in units of log2(e), so e^(2x) is 2^(2 score log2(e) / cap).
        const float x = s[i] * scale / cap;
        s[i] = cap * (1.0f - 2.0f / (1.0f + exp2_approx(2.8853900817779268f * x)));
    }
}

// Scores become weights; f: what sums so far are multiplied by.
DEVICE void softmax(float* s, Rows& r, float unit, float* f) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x = fmaxf(s[i * 2], s[i * 2 + 1]);
#pragma unroll
        for (int j = 1; j < STAGE / 8; j++) x = fmaxf(x, fmaxf(s[j * 4 + i * 2], s[j * 4 + i * 2 + 1]));
        x = fmaxf(x, __shfl_xor_sync(FULL, x, 1));
        x = fmaxf(x, __shfl_xor_sync(FULL, x, 2));
        const float n = fmaxf(r.m[i], x * unit - LIFT);
        f[i] = exp2_approx(r.m[i] - n);
        r.m[i] = n;
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < STAGE / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float& c = s[j * 4 + i * 2 + h];
                c = exp2_approx(c * unit - n);
                sum += c;
            }
        r.sum[i] = r.sum[i] * f[i] + sum;
    }
}

DEVICE void rescale(float* o, const float* f) {
    // Most stages leave the maximum of all rows as it is; a factor of 1 changes nothing.
    if (__any_sync(FULL, f[0] != 1.0f || f[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < SUMS; i++) o[i] *= f[i / 2 % 2];
    }
}

// Weights as left operands: [16 columns][register].
DEVICE void pack_weights(u32 (*w)[4], const float* s) {
#pragma unroll
    for (int i = 0; i < STAGE / 16; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) w[i][e] = half2_of(s[i * 8 + e / 2 * 4 + e % 2 * 2], s[i * 8 + e / 2 * 4 + e % 2 * 2 + 1]);
}

// Channel of the left operand of slice-step i, register e (row g + 8 (e % 2)): two channels from here on.
DEVICE u32 q_channel(int i, int e, u32 t) {
#if WGMMA
    return (i / 2 * 2 + t / 2) * 16 + i % 2 * 8 + t % 2 * 2 + e / 2 * 4;
#else
    return i * 16 + t * 4 + e / 2 * 2;
#endif
}

constexpr int Q_REGISTERS = Q_SHARED ? 1 : SLICES;

#if WGMMA
// s = q * keys of stage k; not finished before wgmma_wait.
DEVICE void multiply_keys(float* s, const u32 (*q)[4], u32 q_at, u32 keys) {
#pragma unroll
    for (int i = 0; i < SLICES; i++)
#pragma unroll
        for (int n = 0; n < STAGE / 64; n++) {
            const u64 b = matrix_at(keys + i * 2 * K_CHUNK + n * 1024, K_CHUNK);
            if (Q_SHARED) wgmma64_shared(s + n * 32, matrix_at(q_at + i * 2048, 1024), b, i > 0);
            else wgmma64(s + n * 32, q[Q_SHARED ? 0 : i], b, i > 0);
        }
}
// o += weights * values.
DEVICE void multiply_values(float* o, const u32 (*w)[4], u32 values) {
#pragma unroll
    for (int i = 0; i < STAGE / 16; i++) {
        const u32 at = values + i * 2 * V_CHUNK;
#pragma unroll
        for (int n = 0; n + 128 <= CHANNELS; n += 128) wgmma128(o + n / 2, w[i], matrix_at(at + n * 16, V_CHUNK), 1);
        if (CHANNELS < 128) wgmma64(o, w[i], matrix_at(at, V_CHUNK), 1);
        if (CHANNELS == 96) wgmma32(o + 32 % SUMS, w[i], matrix_at(at + 1024, V_CHUNK), 1);
    }
}
#else
DEVICE void multiply_keys(float* s, const u32 (*q)[4], u32 q_at, u32 keys, u32 lane) {
    const u32 at = keys + lane % 4 * K_CHUNK + lane / 4 * 16;
#pragma unroll
    for (int i = 0; i < SLICES; i += 2) {
        u32 a[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (Q_SHARED) x = load_shared4(q_at + (i + n) * 512 + lane * 16);
            else x = make_uint4(q[(i + n) % Q_REGISTERS][0], q[(i + n) % Q_REGISTERS][1], q[(i + n) % Q_REGISTERS][2], q[(i + n) % Q_REGISTERS][3]);
            a[n][0] = x.x, a[n][1] = x.y, a[n][2] = x.z, a[n][3] = x.w;
        }
#pragma unroll
        for (int j = 0; j < STAGE / 8; j++) {
            const uint4 b = load_shared4(at + i * 2 * K_CHUNK + j * 128);
            if (i == 0) mma_first(s + j * 4, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
            else mma(s + j * 4, a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
            mma(s + j * 4, a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
        }
    }
}
DEVICE void multiply_values(float* o, const u32 (*w)[4], u32 values, u32 lane) {
    const u32 at = values + lane % 4 * V_CHUNK + lane / 4 * 16;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < CHANNELS / 8; j++) {
            const uint4 x = load_shared4(at + b * 4 * V_CHUNK + j * 128);
            mma(o + j * 4, w[2 * b][0], w[2 * b][1], w[2 * b][2], w[2 * b][3], x.x, x.y);
            mma(o + j * 4, w[2 * b + 1][0], w[2 * b + 1][1], w[2 * b + 1][2], w[2 * b + 1][3], x.z, x.w);
        }
}
#endif

DEVICE void store_two(const Params& p, u64 at, float x, float y) {
#if OUT_BF16
    *(u32*)((u16*)p.out + at) = (u32)bf16_of(x) | (u32)bf16_of(y) << 16;
#else
    *(float2*)((float*)p.out + at) = make_float2(x, y);
#endif
}

DEVICE void multiply(const Params& p, const Work& work, const Ring& ring) {
    const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
    const u32 q_heads = p.kv_heads * p.ratio, rows = (work.last + 1 - work.first) * p.ratio;
    const u32 row = ring.rows + (warp * 16 + g) * 8;
    u32 at[2];
    Rows r;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 n = warp * 16 + g + i * 8, token = n / p.ratio;
        at[i] = n < rows ? (work.first + token - p.begin) * q_heads + work.kv_head * p.ratio + n % p.ratio : NOBODY;
        if (t == 0) store_shared(row + i * 64, n < rows ? work.first + token : work.last), store_shared(row + i * 64 + 4, at[i]);
        r.m[i] = NOTHING, r.sum[i] = 0.0f;
    }
    __syncwarp();
    u32 q[Q_REGISTERS][4];
    const u32 q_at = ring.q + (WGMMA ? warp / 4 * 64 : warp * 16) * CHANNELS * 2;
#pragma unroll
    for (int i = 0; i < SLICES; i++) {
        u32 x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const u32 channel = q_channel(i, e, t);
            x[e] = at[e % 2] != NOBODY && channel < HEAD_DIM ? *(const u32*)(p.q + (u64)at[e % 2] * HEAD_DIM + channel) : 0;
            if (!Q_SHARED) q[i % Q_REGISTERS][e] = x[e];
            else if (WGMMA) store_shared(q_at + (i * 2 + e / 2) * 1024 + (warp % 4 * 16 + g + e % 2 * 8) * 16 + t * 4, x[e]);
        }
        if (Q_SHARED && !WGMMA) store_shared4(q_at + i * 512 + lane * 16, x[0], x[1], x[2], x[3]);
    }
#if WGMMA
    if (Q_SHARED) {
        fence_copy_engine();
        join(1 + warp / 4, 128);
    }
#else
    __syncwarp();
#endif
    float o[SUMS], s[STAGE / 2], f[2];
    u32 w[STAGE / 16][4];
#pragma unroll
    for (int i = 0; i < SUMS; i++) o[i] = 0.0f;
    const u32 stages = work.end - work.begin;
    const u32 all_low = first_seen(p.rule, work.last, p.first_visible);
    auto weigh = [&](u32 k) {
        float unit = p.scale;
#if SOFTCAP
        cap_scores(s, unit, p.softcap);
        unit = 1.0f;
#endif
        const u32 first = (work.begin + k) * STAGE;
        if (first < all_low || first + STAGE > work.first + 1) mask(s, p, row, first, t);
        softmax(s, r, unit, f);
    };
    auto done = [&](u32 side, u32 k) {
        __syncwarp();
        if (lane == 0) phase_arrive(ring.empty(side, k));
    };
#if WGMMA
    if (stages > 0) {
        phase_wait(ring.full(0, 0), 0);
        wgmma_fence();
        multiply_keys(s, q, q_at, ring.keys_at(0));
        wgmma_commit();
        wgmma_wait<0>();
        hold<STAGE / 2>(s);
        done(0, 0);
        weigh(0);
        pack_weights(w, s);
        phase_wait(ring.full(1, 0), 0);
        // The scores of a stage and the softmax of them run beside the values of the one before.
#pragma unroll 1
        for (u32 k = 1; k < stages; k++) {
            phase_wait(ring.full(0, k), ring.parity(k));
            hold<STAGE / 2>(s);
            hold<SUMS>(o);
            wgmma_fence();
            multiply_keys(s, q, q_at, ring.keys_at(k));
            wgmma_commit();
            wgmma_fence();
            multiply_values(o, w, ring.values_at(k - 1));
            wgmma_commit();
            wgmma_wait<1>();
            hold<STAGE / 2>(s);
            done(0, k);
            weigh(k);
            hold<STAGE / 2>(s);
            // ptxas would move the softmax behind the wait for the products; not behind a branch that depends on it, as the wait for
            // the next values does here. `never` is 0, which ptxas does not know.
            const u32 never = p.row_tiles >> 31 & (__float_as_uint(r.sum[0]) | __float_as_uint(r.sum[1]));
            phase_wait(ring.full(1, k), ring.parity(k) ^ never);
            wgmma_wait<0>();
            hold<SUMS>(o);
            done(1, k - 1);
            rescale(o, f);
            pack_weights(w, s);
        }
        hold<SUMS>(o);
        wgmma_fence();
        multiply_values(o, w, ring.values_at(stages - 1));
        wgmma_commit();
        wgmma_wait<0>();
        hold<SUMS>(o);
    }
#else
#pragma unroll 1
    for (u32 k = 0; k < stages; k++) {
        phase_wait(ring.full(0, k), ring.parity(k));
        multiply_keys(s, q, q_at, ring.keys_at(k), lane);
        done(0, k);
        weigh(k);
        rescale(o, f);
        pack_weights(w, s);
        phase_wait(ring.full(1, k), ring.parity(k));
        multiply_values(o, w, ring.values_at(k), lane);
        done(1, k);
    }
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
        r.sum[i] += __shfl_xor_sync(FULL, r.sum[i], 1);
        r.sum[i] += __shfl_xor_sync(FULL, r.sum[i], 2);
    }
    if (p.splits > 1) {
        const u32 item = load_shared(ring.notes), split = load_shared(ring.notes + 4);
        // Thread by thread: the last block's threads hold the same rows and channels.
        float* all = p.partials + (u64)item * p.splits * PARTIAL + thread;
        constexpr u32 THREADS = WARPS * 32;
        float* own = all + (u64)split * PARTIAL;
#pragma unroll
        for (int i = 0; i < SUMS; i++) __stcg(own + i * THREADS, o[i]);
#pragma unroll
        for (int i = 0; i < 2; i++) __stcg(own + (SUMS + i) * THREADS, r.m[i]), __stcg(own + (SUMS + 2 + i) * THREADS, r.sum[i]);
        join(3, THREADS);
        if (thread == 0) {
            u32 before;
            asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p.counters + item) : "memory");
            if (before == p.splits - 1) p.counters[item] = 0;
            store_shared(ring.notes + 8, before == p.splits - 1);
        }
        join(3, THREADS);
        if (!load_shared(ring.notes + 8)) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            r.m[i] = NOTHING, r.sum[i] = 0.0f;
            for (u32 n = 0; n < p.splits; n++) r.m[i] = fmaxf(r.m[i], __ldcg(all + (u64)n * PARTIAL + (SUMS + i) * THREADS));
        }
#pragma unroll
        for (int i = 0; i < SUMS; i++) o[i] = 0.0f;
#pragma unroll 1
        for (u32 n = 0; n < p.splits; n++) {
            const float* part = all + (u64)n * PARTIAL;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                f[i] = exp2_approx(__ldcg(part + (SUMS + i) * THREADS) - r.m[i]);
                r.sum[i] += f[i] * __ldcg(part + (SUMS + 2 + i) * THREADS);
            }
#pragma unroll
            for (int i = 0; i < SUMS; i++) o[i] += f[i / 2 % 2] * __ldcg(part + i * THREADS);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const u32 mine = load_shared(row + i * 64 + 4);
        if (mine == NOBODY) continue;
        float factor = 1.0f;
        if (p.sink_logits) {
            const float logit = p.sink_logits[mine % q_heads] * 1.4426950408889634f;
            const float most = fmaxf(r.m[i], logit - LIFT);
            factor = exp2_approx(r.m[i] - most);
            r.sum[i] = r.sum[i] * factor + exp2_approx(logit - most);
        }
        factor /= r.sum[i];
#pragma unroll
        for (int j = 0; j < CHANNELS / 8; j++)
            if (j * 8 < HEAD_DIM) store_two(p, (u64)mine * HEAD_DIM + j * 8 + t * 2, o[j * 4 + i * 2] * factor, o[j * 4 + i * 2 + 1] * factor);
    }
}

// Grid: row_tiles * kv_heads * splits, the last tiles (the longest) first.
extern "C" __global__ void __launch_bounds__((WARPS + FEEDERS) * 32, 1) prefill(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 shared[];
    const u32 base = shared_address(shared), warp = threadIdx.x >> 5;
    Ring ring;
    ring.keys = base, ring.values = base + SLOTS * K_STAGE, ring.q = ring.values + SLOTS * V_STAGE;
    ring.rows = ring.q + Q_BYTES, ring.barriers = ring.rows + ROWS * 8, ring.notes = ring.barriers + SLOTS * 32;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 2 * SLOTS; i++) phase_init(ring.barriers + i * 16, FEEDERS / 2), phase_init(ring.barriers + i * 16 + 8, WARPS);
#if WGMMA
        fence_copy_engine();
#endif
    }
    const u32 of_tile = p.kv_heads * p.splits, tile = p.row_tiles - 1 - blockIdx.x / of_tile;
    const u32 kv_head = blockIdx.x % of_tile / p.splits, split = blockIdx.x % p.splits;
    const RowTile rows = p.tiles[tile];
    Work work;
    work.first = rows.first, work.last = rows.first + rows.tokens - 1, work.kv_head = kv_head;
    work.low = first_seen(p.rule, work.first, p.first_visible);
    work.edge = K_BITS == 16 ? 0 : edge_of(p.rule, work.first);
    work.sinks = work.edge > 0 ? p.rule.sinks : 0;
    const u32 from = work.low / STAGE, stages = work.last / STAGE + 1 - from;
    work.begin = from + stages * split / p.splits, work.end = from + stages * (split + 1) / p.splits;
    if (threadIdx.x == 0) store_shared(ring.notes, tile * p.kv_heads + kv_head), store_shared(ring.notes + 4, split);
    __syncthreads();
    if (warp < WARPS) {
#if WGMMA
        more_registers<MULTIPLY_REGISTERS>();
#endif
        multiply(p, work, ring);
    } else {
#if WGMMA
        fewer_registers<FEED_REGISTERS>();
#endif
        const u32 lane = threadIdx.x & 31, feeder = warp - WARPS;
        const Feeder f = {p, work, ring, lane, lane >> 2, lane & 3};
        if (feeder < 2) f.run<0>(feeder);
        else f.run<1>(feeder - 2);
    }
}
