// How attention's work is cut among blocks of threads. Lengths are read on the device, so a captured graph stays valid while
// sequences grow.
//
// A row is one request and one block of up to 8 query heads that share a kv head; its units are those of `Extent`. plan[b] counts
// pieces of all rows of requests before b, plan[batch] all of them. Two ways to cut, chosen by `chunk`:
//   balanced (chunk 0): a piece is a unit; block c of G takes pieces [c Q, (c+1) Q), Q = ceil(pieces / G), across rows.
//   invariant: a piece is a chunk of `chunk` units of one row, counted from its first; block c takes pieces c, c + G, ...: how a
//     row is cut and merged depends on that row only.
#pragma once
#include "extent.cuh"

// A run of units of one row, and which part of the row's split it is.
struct Item {
    u32 request, head;
    u32 begin, end;
    u32 split, splits;
    u32 slot;   // where its partial result goes when splits > 1
    u32 first_slot, slot_step;  // slots of split i > 0: first_slot + i * slot_step; of split 0: zero_slot
    u32 zero_slot;
};

// The request that piece `piece` belongs to: the last b with plan[b] <= piece, looked for by a whole warp.
DEVICE u32 request_of(const u32* plan, u32 batch, u32 piece, u32 lane) {
    u32 found = 0;
    for (u32 from = 0; from < batch; from += 32) {
        const u32 b = from + lane;
        const bool before = b < batch && plan[b] <= piece;
        const u32 ballot = __ballot_sync(0xffffffffu, before);
        if (ballot == 0) break;
        found = from + 31 - __clz(ballot);
        if (ballot != 0xffffffffu) break;
    }
    // Requests without pieces share their number with the next one.
    return found;
}
