// Which keys a query sees, and how: the rule of `PackedScheme::edge` (crates/kv/src/scheme.rs). Everything is said by positions.
#pragma once
#include "ptx.cuh"

// The numbers of a scheme that decide where a key is read from.
struct Rule {
    u32 group_len;   // 0: nothing is packed
    u32 window_len;  // newest tokens that are plain
    u32 page_len;    // 0: no pages
    u32 sinks;       // first tokens that are plain
    u32 visible;     // keys that a query sees, itself included; 0: all
};

// First position that a query at `position` sees plain, the sinks aside; a multiple of group_len.
DEVICE u32 edge_of(const Rule& r, u32 position) {
    if (r.group_len == 0) return 0;
    const u32 seen = position + 1;
    u32 edge = seen > r.window_len ? (seen - r.window_len) / r.group_len * r.group_len : 0;
    if (r.page_len > 0) edge = max(edge, position / r.page_len * r.page_len);
    return edge;
}

// First position that it sees at all.
DEVICE u32 first_seen(const Rule& r, u32 position, u32 asked) {
    const u32 by_layer = r.visible > 0 && position + 1 > r.visible ? position + 1 - r.visible : 0;
    return max(by_layer, asked);
}

// What attention of one query reads: units, numbered in this order: groups from first_group on (packed), tiles of 16 plain
// tokens from first_tile on, and one tile of sinks if there is one.
struct Extent {
    u32 len;    // keys, the query's own included
    u32 first;  // first visible position
    u32 edge;
    u32 first_group, groups;
    u32 first_tile, tiles;
    u32 sink_tiles;
    DEVICE_MEMBER u32 units() const { return groups + tiles + sink_tiles; }
};

// `packed`: whether packed groups are read as records; else all keys are read as plain tiles (`tiled_from` 0), or the keys from
// the edge on are.
DEVICE Extent extent_of(const Rule& r, u32 len, u32 asked_first, bool packed) {
    Extent e = {len, 0, 0, 0, 0, 0, 0, 0};
    if (len == 0) return e;
    // A query sees itself at least.
    e.first = min(first_seen(r, len - 1, asked_first), len - 1);
    e.edge = edge_of(r, len - 1);
    u32 tiled_from = e.first;
    if (packed) {
        if (e.first < e.edge) {
            e.first_group = e.first / r.group_len;
            e.groups = e.edge / r.group_len - e.first_group;
        }
        tiled_from = max(e.first, e.edge);
    }
    e.first_tile = tiled_from / 16;
    e.tiles = (len + 15) / 16 - e.first_tile;
    // Sinks that are not among the newest tokens have a tile of their own.
    e.sink_tiles = r.sinks > e.first && e.edge > 0 ? 1 : 0;
    return e;
}
