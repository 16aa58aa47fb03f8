// How attention's work is cut among blocks of threads. Lengths are read on the device, so a captured graph stays valid while
// sequences grow.
//
// A row is one request and one block of up to 8 query heads that share a kv head; its units are those of `Extent`. plan[b] counts
// pieces of all rows of requests before b, plan[batch] all of them; plan[batch + 1] says how rows are cut:
//   0, balanced: a piece is a unit; block c of G takes pieces [c Q, (c+1) Q), Q = ceil(pieces / G), across rows. For more rows than
//     blocks.
//   Q, even: a piece is one of the ceil(units / Q) even parts of a row; block c takes piece c. For at most as many rows as blocks:
//     Q is the smallest that gives every block one piece at most, so none has to begin and end twice.
// In the invariant mode (`chunk`) a piece is a chunk of `chunk` units of one row, counted from its first, and block c takes pieces
// c, c + G, ...: how a row is cut and merged depends on that row only.
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

// What a warp reads of the plan and the batch at once, before it knows which of it it needs: each lane one request's numbers, so that
// small batches wait for memory once.
struct Glance {
    u32 before, after, len, slot, first;  // of request `lane`
    u32 pieces, cut;
};
DEVICE Glance glance(const u32* plan, const u32* lens, const u32* slots, const u32* first_visible, u32 batch, u32 lane) {
    const u32 b = min(lane, batch - 1);
    Glance g = {plan[b], plan[b + 1], lens[b], slots[b], first_visible ? first_visible[b] : 0, plan[batch], plan[batch + 1]};
    if (lane >= batch) g.before = 0xffffffffu;
    return g;
}

// A request with its pieces.
struct Request {
    u32 number, before, after, len, slot, first;
};
// The request that piece `piece` belongs to: the last b with plan[b] <= piece and pieces of its own, looked for by a whole warp.
DEVICE Request request_of(const Glance& g, const u32* plan, const u32* lens, const u32* slots, const u32* first_visible, u32 batch,
                          u32 piece) {
    const u32 lane = threadIdx.x & 31;
    u32 found = 31 - __clz(__ballot_sync(0xffffffffu, g.before <= piece) | 1);
    if (batch <= 32) {
        auto of = [&](u32 x) { return __shfl_sync(0xffffffffu, x, found); };
        return {found, of(g.before), of(g.after), of(g.len), of(g.slot), of(g.first)};
    }
    for (u32 from = 32; from < batch; from += 32) {
        const u32 b = from + lane;
        const u32 ballot = __ballot_sync(0xffffffffu, b < batch && plan[b] <= piece);
        if (ballot == 0) break;
        found = from + 31 - __clz(ballot);
    }
    return {found, plan[found], plan[found + 1], lens[found], slots[found], first_visible ? first_visible[found] : 0};
}
