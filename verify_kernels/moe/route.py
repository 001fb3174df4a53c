# SPDX-License-Identifier: Apache-2.0
"""Routing of all rows in one launch: the top experts, their weights, who needs whom.

A row belongs to one warp for 128 experts, a lane has four neighbouring ones. Keys are
the integers in the order of score + bias. No sort and no rounds of maxima:

    threshold   the largest key of every 32 experts; of those maxima the top_k-th is a
                bound that top_k experts reach, and 23 of 896 on average if they are
                spread evenly (33 and more in one row of 100)
    rank        of each expert that reaches it: how many of these come before it. So
                equal keys are in order of id, and a rank has one expert
    plan        a bit for each row and expert goes to CTA 0, whose warps transpose
                them, 32 rows at a time, and count

With several CTAs in a cluster the rows are dealt out to them; nothing of a row depends
on that, on M or on another row. The weights' sum is a tree over the ranks. A row that
pads a graph is told by a byte: it has no bits, its ids are -1 and its weights 0.

Early loads: the bias.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from verify_kernels.batch import MAX_ROWS
from verify_kernels.common import ptx
from verify_kernels.common.shared import put, word
from verify_kernels.moe.device import open_once, sigmoid

INFINITY_BITS = 0x7F800000
#: Below every key; that of NaN, above all others.
NONE = -(2**31)
NAN_KEY = INFINITY_BITS + 1
#: No integer is above it, so neither is what other kernels left in shared memory: the
#: tensor cores' NaN is 0x7FFFFFFF.
LARGEST = 2**31 - 1
#: Experts of a warp and of a group whose largest key is taken.
SPAN = 128
GROUP = 32
#: Keys that a lane compares at a time.
CHUNK = 8
#: More experts of a warp that reach the threshold: then it looks for equal keys, of
#: which the first top_k are enough.
MANY = 32


def largest(values):
    """Of some Int32, in a balanced tree."""
    while len(values) > 1:
        pairs = zip(values[::2], values[1::2], strict=False)
        rest = values[len(values) // 2 * 2 :]
        values = [cutlass.max(a, b) for a, b in pairs] + list(rest)
    return values[0]


def ballots(votes):
    return [cute.arch.vote_ballot_sync(vote) for vote in votes]


def ones(words):
    """How many bits are set in all of some words."""
    total = cute.arch.popc(words[0])
    for other in words[1:]:
        total = total + cute.arch.popc(other)
    return total


def transposed(word, lane):
    """Bit b of lane r becomes bit r of lane b."""
    for step, low in (
        (16, 0x0000FFFF),
        (8, 0x00FF00FF),
        (4, 0x0F0F0F0F),
        (2, 0x33333333),
        (1, 0x55555555),
    ):
        other = cute.arch.shuffle_sync_bfly(word, offset=step)
        # Constants as signed 32-bit numbers; a shift to the right brings sign bits
        # only where they are masked out.
        upper = (lane & step) != 0
        high = ~low
        moved = cutlass.select_(upper, (other >> step) & low, (other << step) & high)
        word = cutlass.select_(upper, word & high, word & low) | moved
    return word


class RouteKernel:
    """One number of experts and of those chosen, for 1 to 64 rows.

    Args:
        experts: E, a multiple of 4 up to 896.
        top_k: K, 4, 8 or 16.
        ctas: of the one cluster, 1, 2, 4 or 8.
        slots: rows that a CTA works on at a time, a power of two.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    parameters = (
        "logits",
        "bias",
        "padding",
        "weights",
        "ids",
        "experts",
        "offsets",
        "pairs",
        "counts",
    )
    early_loads = ("bias",)

    def __init__(self, experts: int, top_k: int, ctas: int, slots: int):
        self.experts = experts
        self.top_k = top_k
        self.ctas = ctas
        self.slots = slots
        self.warps = -(-experts // SPAN)
        self.across = 32 * self.warps
        self.threads = self.across * slots
        self.step_bits = (ctas * slots).bit_length() - 1
        self.k_bits = top_k.bit_length() - 1
        #: Groups whose maxima give the threshold; too few of them: all experts reach
        #: it.
        self.groups = experts // GROUP if experts // GROUP > top_k else 0

        # Shared memory: barrier; bits of all rows [row, warp, 4], lane the bit; ids of
        # all rows; counts of the plan's warps; then what each slot needs for its row,
        # whose place the plan takes when the rows are done.
        self.bits_at = 16
        self.ids_at = self.bits_at + MAX_ROWS * 16 * self.warps
        self.totals_at = self.ids_at + MAX_ROWS * 4 * top_k
        self.slots_at = self.totals_at + 32
        # Of a slot: group maxima; thresholds and counts of warps; the chosen ids and
        # scores by rank; key and id of the last; keys, ids, scores of a warp's experts
        # that reach the threshold, in ascending id, then keys that are below all. Lanes
        # read 16 bytes of eight warps' at once: a pitch at which they meet all banks.
        self.bounds_at = 128
        self.found_at = self.bounds_at + 32
        self.chosen_at = self.found_at + 32
        self.last_at = self.chosen_at + 8 * top_k
        self.keys_at = self.last_at + 16
        self.pitch = 4 * min(experts, SPAN) + 48
        self.array = self.warps * self.pitch
        self.slot_bytes = self.keys_at + 3 * self.array
        # Of the plan: offset and rows of every expert; the experts that are used and
        # their offsets.
        self.used_at = self.slots_at + 16 * experts
        self.starts_at = self.used_at + 4 * experts
        self.shared_bytes = max(
            self.slots_at + slots * self.slot_bytes, self.starts_at + 4 * experts
        )

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor,
        padding: cute.Tensor,
        weights: cute.Tensor,
        ids: cute.Tensor,
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        scale: Float32,
        told: Int32,
        pdl: Int32,
        stream,
    ):
        self.kernel(
            logits,
            bias,
            padding,
            weights,
            ids,
            experts,
            offsets,
            pairs,
            counts,
            scale,
            told,
        ).launch(
            grid=[self.ctas, 1, 1],
            block=[self.across, self.slots, 1],
            cluster=[self.ctas, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            # As the kernels around it: an SM that must recut its shared memory first
            # drains.
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor,
        padding: cute.Tensor,
        weights: cute.Tensor,
        ids: cute.Tensor,
        experts: cute.Tensor,
        offsets: cute.Tensor,
        pairs: cute.Tensor,
        counts: cute.Tensor,
        scale: Float32,
        told: Int32,
    ):
        rank, _, _ = cute.arch.block_idx()
        across, slot, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = across >> 5
        base = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        mine = base + self.slots_at + slot * self.slot_bytes
        rows = logits.shape[0]

        if const_expr(self.ctas > 1):
            waits = (rank == 0) & (across == 0) & (slot == 0)
            open_once(base, waits, rows * (16 * self.warps + 4 * self.top_k))
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()
        if (across >= self.groups) & (across < 32):
            put(mine + 4 * across, Int32(NONE))
        if (across >= self.warps) & (across < 8):
            put(mine + self.found_at + 4 * across, Int32(0))

        # A lane of experts that do not exist loads those of another, and drops them.
        column = cutlass.min(across, Int32(self.experts // 4 - 1))
        real = across < self.experts // 4
        bias_words = ptx.load_global_128(bias.iterator.toint() + Int64(16) * column)
        cute.arch.griddepcontrol_wait()
        if const_expr(self.ctas > 1):
            cute.arch.cluster_wait()

        turns = (rows + (1 << self.step_bits) - 1) >> self.step_bits
        for turn in cutlass.range(turns, unroll=1):
            row = (turn << self.step_bits) + slot * self.ctas + rank
            keys = [Int32(NONE) for _ in range(4)]
            scores = [Float32(0.0) for _ in range(4)]
            live = row < rows
            if live & (told != 0):
                live = padding[row] == 0
            if (row < rows) & real:
                place = Int64(4) * logits.stride[0] * row + Int64(16) * column
                words = ptx.load_global_128(logits.iterator.toint() + place)
                scores = [sigmoid(ptx.float_from_bits(word)) for word in words]
                keys = [
                    self.key(score + ptx.float_from_bits(word))
                    for score, word in zip(scores, bias_words, strict=True)
                ]
            bound = self.threshold(keys, mine, warp, lane)
            count = self.collect(keys, scores, bound, mine, across, lane)
            cute.arch.sync_threads()
            self.rank(count, mine, warp, lane)
            cute.arch.sync_threads()
            if row < rows:
                self.send_bits(keys, mine, base, row, live, across, lane)
                if warp == 0:
                    self.weigh(mine, base, row, live, lane, weights, ids, scale)

        if const_expr(self.ctas == 1):
            cute.arch.sync_threads()
            self.plan(base, rows, experts, offsets, pairs, counts)
        else:
            if rank == 0:
                ptx.wait_cluster(base, 0)
            # What a CTA sends may be under way when it is done: it stays until all of
            # it has come.
            cute.arch.cluster_arrive_relaxed()
            if rank == 0:
                self.plan(base, rows, experts, offsets, pairs, counts)
            cute.arch.cluster_wait()

    @cute.jit
    def key(self, choice):
        """An integer in the order of Float32 numbers, NaN the largest."""
        bits = ptx.float_bits(choice)
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        is_nan = (bits & 0x7FFFFFFF) > INFINITY_BITS
        return cutlass.select_(is_nan, Int32(NAN_KEY), ordered)

    @cute.jit
    def threshold(self, keys, mine, warp, lane):
        """A key that at least top_k experts of the row reach.

        The top_k-th largest of the groups' maxima. Eight lanes compare a group's with
        all others, four each.
        """
        bound = Int32(NONE + 1)
        if const_expr(self.groups > 0):
            top = largest(keys)
            for offset in (1, 2, 4):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            if (lane & 7) == 0:
                put(mine + 16 * warp + (lane >> 1), top)
            cute.arch.sync_threads()
            others = ptx.load_shared_128(mine + 16 * (lane & 7))
            votes = ballots([other >= top for other in others])
            bits = Int32(0)
            for i in cutlass.range_constexpr(4):
                bits = bits | (((votes[i] >> (lane & 24)) & 255) << (8 * i))
            reached = cute.arch.popc(bits) >= self.top_k
            own = cutlass.select_(reached, top, Int32(NONE))
            own = cute.arch.warp_redux_sync(own, "max")
            if lane == 0:
                put(mine + self.bounds_at + 4 * warp, own)
            cute.arch.sync_threads()
            bounds = [
                *ptx.load_shared_128(mine + self.bounds_at),
                *ptx.load_shared_128(mine + self.bounds_at, 16),
            ]
            bound = cutlass.max(bound, largest(bounds[: self.warps]))
        return bound

    @cute.jit
    def collect(self, keys, scores, bound, mine, across, lane):
        """This warp's experts that reach the bound, in ascending id, to shared memory;
        how many there are."""
        warp = across >> 5
        below = (Int32(1) << lane) - 1
        takes = ballots([key >= bound for key in keys])
        count = ones(takes)
        if count > MANY:
            equal = ballots([key == bound for key in keys])
            place = ones([votes & below for votes in equal])
            wanted = []
            for v in cutlass.range_constexpr(4):
                same = keys[v] == bound
                wanted.append((keys[v] > bound) | (same & (place < self.top_k)))
                place = place + ((equal[v] >> lane) & 1)
            takes = ballots(wanted)
            count = ones(takes)
        at = ones([votes & below for votes in takes])
        at = mine + self.keys_at + self.pitch * warp + 4 * at
        for v in cutlass.range_constexpr(4):
            taken = (takes[v] >> lane) & 1
            if taken != 0:
                put(at, keys[v])
                put(at + self.array, 4 * across + v)
                put(at + 2 * self.array, scores[v], Float32)
            at = at + 4 * taken
        if lane < CHUNK:
            end = mine + self.keys_at + self.pitch * warp + 4 * count
            put(end + 4 * lane, Int32(NONE))
        if lane == 0:
            put(mine + self.found_at + 4 * warp, count)
        return count

    @cute.jit
    def rank(self, count, mine, warp, lane):
        """Ranks of this warp's experts; the first top_k of the row to their places.

        Four at a time, eight lanes each; each of the eight counts in what one warp
        found, those that come before.
        """
        part = lane & 7
        others = word(mine + self.found_at + 4 * part)
        most = cute.arch.warp_redux_sync(others, "max")
        keys = mine + self.keys_at
        own = keys + self.pitch * warp
        theirs = keys + self.pitch * cutlass.min(part, Int32(self.warps - 1))
        for first in cutlass.range(0, count, 4, unroll=1):
            index = first + (lane >> 3)
            at = own + 4 * index
            key = word(at)
            # Keys above this come before; of a warp before this one equal ones too.
            limit = key - cutlass.select_(part < warp, Int32(1), Int32(0))
            ahead = Int32(0)
            for start in cutlass.range(0, most, CHUNK, unroll=1):
                chunk = [
                    *ptx.load_shared_128(theirs + 4 * start),
                    *ptx.load_shared_128(theirs + 4 * start, 16),
                ]
                # Past that warp's end is what another row or kernel has left.
                there = cutlass.select_(start < others, limit, Int32(LARGEST))
                for other in chunk:
                    before = cutlass.select_(other > there, Int32(1), Int32(0))
                    ahead = ahead + before
            # And of this warp's own those before it.
            for start in cutlass.range(0, first + 4, CHUNK, unroll=1):
                place = start + part
                same = word(own + 4 * place) == key
                same = same & (place < index)
                ahead = ahead + cutlass.select_(same, Int32(1), Int32(0))
            for offset in (1, 2, 4):
                ahead = ahead + cute.arch.shuffle_sync_bfly(ahead, offset=offset)
            if (part == 0) & (index < count) & (ahead < self.top_k):
                expert = word(at + self.array)
                score = word(at + 2 * self.array, Float32)
                place = mine + self.chosen_at + 4 * ahead
                put(place, expert)
                put(place + 4 * self.top_k, score, Float32)
                if ahead == self.top_k - 1:
                    put(mine + self.last_at, key)
                    put(mine + self.last_at + 4, expert)

    @cute.jit
    def send_bits(self, keys, mine, base, row, live, across, lane):
        """Which of a warp's experts are chosen: bit lane of word v is 4 lane + v."""
        last = word(mine + self.last_at)
        last_expert = word(mine + self.last_at + 4)
        votes = []
        for v in cutlass.range_constexpr(4):
            before = 4 * across + v <= last_expert
            chosen = (keys[v] > last) | ((keys[v] == last) & before)
            votes.append(chosen & live)
        votes = ballots(votes)
        place = base + self.bits_at + 16 * (row * self.warps + (across >> 5))
        if lane == 0:
            self.send(place, votes, base)

    @cute.jit
    def send(self, place, words, base):
        """16 bytes to the shared memory of CTA 0."""
        if const_expr(self.ctas == 1):
            for i in cutlass.range_constexpr(4):
                put(place + 4 * i, words[i])
        else:
            values = [ptx.float_from_bits(word) for word in words]
            ptx.store_remote_f32x4(place, values, base, Int32(0))

    @cute.jit
    def weigh(self, mine, base, row, live, lane, weights, ids, scale):
        """A row's weights and ids, by one warp."""
        place = mine + self.chosen_at + 4 * (lane & (self.top_k - 1))
        expert = word(place)
        score = word(place + 4 * self.top_k, Float32)
        total = score
        for step in cutlass.range_constexpr(self.k_bits):
            total = total + cute.arch.shuffle_sync_bfly(
                total, offset=self.top_k >> (step + 1)
            )
        if lane < self.top_k:
            weight = score / total * scale
            weights[row, lane] = cutlass.select_(live, weight, Float32(0.0))
            ids[row, lane] = cutlass.select_(live, expert, Int32(-1))
        if lane < self.top_k // 4:
            four = ptx.load_shared_128(mine + self.chosen_at + 16 * lane)
            four = [cutlass.select_(live, word, Int32(-1)) for word in four]
            there = base + self.ids_at + 4 * self.top_k * row + 16 * lane
            self.send(there, four, base)

    @cute.jit
    def plan(self, base, rows, experts, offsets, pairs, counts):
        """All rows' experts, counted and listed, by the threads of one CTA."""
        across, slot, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = across >> 5
        # Of a thread's four experts the rows 0 .. 31 and 32 .. 63 that chose it.
        low = [Int32(0) for _ in range(4)]
        high = [Int32(0) for _ in range(4)]
        found = [Int32(0) for _ in range(4)]
        place = Int32(0)
        if slot == 0:
            if rows == 1:
                words = ptx.load_shared_128(base + self.bits_at + 16 * warp)
                low = [(word >> lane) & 1 for word in words]
            else:
                low = self.columns(base, lane, rows, warp)
            if rows > 32:
                high = self.columns(base, lane + 32, rows, warp)
            sizes = [ones(pair) for pair in zip(low, high, strict=True)]
            found = [n + (cutlass.min(n, Int32(1)) << 16) for n in sizes]
            own = found[0] + found[1] + (found[2] + found[3])
            place = own
            for step in cutlass.range_constexpr(5):
                before = cute.arch.shuffle_sync_up(place, offset=1 << step)
                place = place + cutlass.select_(lane >= 1 << step, before, Int32(0))
            if lane == 31:
                put(base + self.totals_at + 4 * warp, place)
            place = place - own
        cute.arch.sync_threads()

        sums = [
            *ptx.load_shared_128(base + self.totals_at),
            *ptx.load_shared_128(base + self.totals_at, 16),
        ]
        total = Int32(0)
        for w in cutlass.range_constexpr(self.warps):
            place = place + cutlass.select_(warp > w, sums[w], Int32(0))
            total = total + sums[w]
        if (slot == 0) & (across < self.experts // 4):
            for v in cutlass.range_constexpr(4):
                expert = 4 * across + v
                offset = place & 0xFFFF
                record = (offset, low[v], high[v], Int32(0))
                there = base + self.slots_at + 16 * expert
                ptx.store_shared_128_if(there, Int32(1), record)
                if found[v] != 0:
                    number = place >> 16
                    put(base + self.used_at + 4 * number, expert)
                    put(base + self.starts_at + 4 * number, offset)
                place = place + found[v]
        cute.arch.sync_threads()

        thread = slot * self.across + across
        chosen = total & 0xFFFF
        used = total >> 16
        for pair in cutlass.range(thread, rows << self.k_bits, self.threads, unroll=1):
            expert = word(base + self.ids_at + 4 * pair)
            if expert >= 0:
                offset, first, second, _ = ptx.load_shared_128(
                    base + self.slots_at + 16 * expert
                )
                row = pair >> self.k_bits
                below = (Int32(1) << (row & 31)) - 1
                late = row >= 32
                first = cutlass.select_(late, first, first & below)
                second = cutlass.select_(late, second & below, Int32(0))
                pairs[offset + ones([first, second])] = pair
        for four in cutlass.range(thread, self.experts // 4, self.threads, unroll=1):
            listed = ptx.load_shared_128(base + self.used_at + 16 * four)
            starts = ptx.load_shared_128(base + self.starts_at + 16 * four)
            live = [4 * four + i < used for i in range(4)]
            listed = [
                cutlass.select_(is_used, word, Int32(-1))
                for is_used, word in zip(live, listed, strict=True)
            ]
            starts = [
                cutlass.select_(is_used, word, chosen)
                for is_used, word in zip(live, starts, strict=True)
            ]
            at = Int64(16) * four
            ptx.store_global_128(experts.iterator.toint() + at, listed)
            ptx.store_global_128(offsets.iterator.toint() + at, starts)
        end = MAX_ROWS * self.top_k // 4
        nothing = [Int32(-1) for _ in range(4)]
        for four in cutlass.range((chosen >> 2) + thread, end, self.threads, unroll=1):
            ptx.store_global_128(pairs.iterator.toint() + Int64(16) * four, nothing)
        if thread == 0:
            offsets[self.experts] = chosen
            counts[0] = used
            counts[1] = chosen

    @cute.jit
    def columns(self, base, row, rows, warp):
        """Which of 32 rows chose each of a thread's experts; ``row`` is the lane's."""
        there = base + self.bits_at + 16 * (row * self.warps + warp)
        live = cutlass.select_(row < rows, Int32(1), Int32(0))
        zeros = [Int32(0) for _ in range(4)]
        words = ptx.load_shared_128_if(there, live, 0, zeros)
        lane = cute.arch.lane_idx()
        return [transposed(word, lane) for word in words]
