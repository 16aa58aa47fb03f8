// What a launch of attend.cu is given, how its shared memory is laid out, and what feeds a warp's ring: the next part of its units, from records,
// plain tiles, window or sinks. What is defined from outside: attend.cu.
#pragma once
#include "plan.cuh"
#include "record.cuh"
using namespace record;

#define FULL 0xffffffffu
#define BULK (__CUDA_ARCH__ >= 900)

struct Layer {
    const u8* records;  // pages of records: [page][kv_head][group of page]
    const u8* pages;    // pages of plain tiles: [page][kv_head][tile of page]; null: none
    const u8* window;   // ring of plain tiles: [slot][kv_head][window_tiles]
    const u8* sinks;    // one tile: [slot][kv_head]
};

struct Params {
    Layer layer;
    u64 layer_stride[4];       // bytes from one layer's pointers to the next one's (blockIdx.y)
    const u16* q;              // f16 [layers][batch][q_heads][head_dim]
    void* out;                 // the same shape
    const float* sink_logits;  // f32 [q_heads], null: none
    const u32* lens;           // [batch], 0: nobody
    const u32* slots;          // [batch]
    const u32* first_visible;  // [batch], null: 0
    const u32* table;          // page numbers: [slot][table_len]
    const u32* plan;           // [batch + 2]
    float* partials;           // [slots of splits][PARTIAL]
    u32* counters;             // [layers][batch][heads], 0 between launches
    Rule rule;
    u32 batch, kv_heads, ratio, head_blocks;
    u32 table_len, groups_log2, tiles_log2, window_tiles;  // of a page: 2^groups_log2 groups, 2^tiles_log2 tiles
    u32 all_paged;   // every tile is in pages (a plain cache); else those below the edge, when there are pages
    u32 chunk;       // units of a piece; 0: balanced
    float scale;     // of scores, times log2(e)
    float softcap;   // times log2(e)
    u32 partial_stride;  // slots of one layer
    u32 pass;            // query heads of a row, at most HEADS
};
static_assert(sizeof(Params) == PARAMS_BYTES, "as the launcher has it (mod.rs)");

constexpr int HEADS = 8;
constexpr int SLOT_BYTES =
    K_PARAM_BYTES + (K_BITS == 16 ? 0 : PART_BYTES) > TILE_HALF_BYTES ? K_PARAM_BYTES + PART_BYTES : TILE_HALF_BYTES;
constexpr int RING_BYTES = SLOTS * SLOT_BYTES;
// A warp's results: values, sums of value zeros (2), sums of weights (2), as lane-wise floats.
constexpr int STATES = SLICES * 4 + 4;
constexpr int STATE_BYTES = STATES * LANES * 4;
constexpr int MERGED = WARPS / 2;
constexpr int MERGE_BYTES = (MERGED + 1) * STATE_BYTES;
constexpr int WORK_BYTES = WARPS * RING_BYTES > MERGE_BYTES ? WARPS * RING_BYTES : MERGE_BYTES;
// q in shared memory: rows of heads, padded so that eight rows lie in different banks.
constexpr int Q_WORDS = CHANNELS / 2 + (40 - CHANNELS / 2 % 32) % 32;
constexpr int Q_BYTES = HEADS * Q_WORDS * 4;
constexpr int PARTIAL = HEADS * HEAD_DIM + 2 * HEADS;
constexpr float UNIT = 16777216.0f;  // 2^24: a code of 1, read as f16, is 1 / UNIT
constexpr float NOTHING = -1e30f;    // the maximum of no score

struct Row {
    Extent e;
    u32 slot, kv_head;
};

// What a block remembers of its item in shared memory, so that registers are left for the work.
struct Kept {
    Item item;
    Row row;
    u32 piece;  // the next one
};

// Bytes of shared memory that a block needs; SHARED is what it gets.
constexpr int SHARED_BYTES = WORK_BYTES + Q_BYTES + WARPS * HEADS * 4 + WARPS * SLOTS * 8 + 16 + sizeof(Kept);
static_assert(SHARED_BYTES <= SHARED, "the launcher's formula (mod.rs) is too small");

DEVICE u64 page_of(const Params& p, u32 slot, u32 page) { return p.table[(u64)slot * p.table_len + page]; }

// A warp's stream of parts: what to copy next. Units of an item in steps of WARPS, each of some parts.
struct Feed {
    u32 unit, part;
    u32 page;  // of `unit`, asked for ahead
};

template <class R>
DEVICE u32 page_number(const Params& p, const R& row, u32 unit) {
    if (unit < row.e.groups) return page_of(p, row.slot, (row.e.first_group + unit) >> p.groups_log2);
    if (unit < row.e.groups + row.e.tiles) {
        const u32 tile = row.e.first_tile + unit - row.e.groups;
        if (p.all_paged || tile * 16 < row.e.edge) return page_of(p, row.slot, tile >> p.tiles_log2);
    }
    return 0;
}

// Address of a plain tile.
template <class R>
DEVICE const u8* tile_address(const Params& p, u32 layer, const R& row, u32 unit, u32 page) {
    const u32 i = unit - row.e.groups;
    if (i >= row.e.tiles) return p.layer.sinks + layer * p.layer_stride[3] + ((u64)row.slot * p.kv_heads + row.kv_head) * TILE_BYTES;
    const u32 tile = row.e.first_tile + i;
    if (p.all_paged || tile * 16 < row.e.edge)
        return p.layer.pages + layer * p.layer_stride[1] + ((u64)(page * p.kv_heads + row.kv_head << p.tiles_log2) + (tile & (1u << p.tiles_log2) - 1)) * TILE_BYTES;
    return p.layer.window + layer * p.layer_stride[2] + (((u64)row.slot * p.kv_heads + row.kv_head) * p.window_tiles + tile % p.window_tiles) * TILE_BYTES;
}

DEVICE void copy_part(u32 to, const u8* from, u32 bytes, u32 barrier, u32 lane) {
#if BULK
    if (lane == 0) bulk_copy(to, from, bytes, barrier);
#else
#pragma unroll 4
    for (u32 at = lane * 16; at < bytes; at += LANES * 16) copy16(to + at, from + at);
#endif
}

// Starts the copy of the next part into a slot, if there is one.
template <class R>
DEVICE void feed_next(Feed& f, const Params& p, u32 layer, const R& row, u32 end, u32 ring, u32 barriers, u32 slot, u32 lane) {
    if (f.unit < end) {
        u32 parts = 2, bytes = TILE_HALF_BYTES, to = ring + slot * SLOT_BYTES;
        const u8* from;
        if (K_BITS != 16 && f.unit < row.e.groups) {
            const u32 group = row.e.first_group + f.unit;
            parts = PARTS;
            from = p.layer.records + layer * p.layer_stride[0] + ((u64)(f.page * p.kv_heads + row.kv_head << p.groups_log2) + (group & (1u << p.groups_log2) - 1)) * RECORD_BYTES;
            bytes = PART_BYTES;
            if (f.part == 0) bytes += K_PARAM_BYTES;
            else from += K_PARAM_BYTES + f.part * PART_BYTES, to += K_PARAM_BYTES;
        } else {
            from = tile_address(p, layer, row, f.unit, f.page) + f.part * TILE_HALF_BYTES;
        }
        copy_part(to, from, bytes, barriers + slot * 8, lane);
        if (++f.part == parts) {
            f.part = 0;
            f.unit += WARPS;
            if (f.unit < end) f.page = page_number(p, row, f.unit);
        }
    }
#if !BULK
    copy_commit();
#endif
}
