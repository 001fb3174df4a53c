# SPDX-License-Identifier: Apache-2.0
"""One step of DSpark's sequential head for up to 64 requests; with e = W1[previous],

    logits = base[:, step] + bf16(W2 e),    token = argmax(logits)

rounded to bf16 once more where base is bf16. With noise (`verify_kernels.markov.noise`)
the argmax is that of logits / temperature + noise for requests whose temperature is not
0. A draft of N tokens is N + 1 launches one behind the other; the last only stores.

    ahead       a CTA has a run of 16-row tiles of W2, its warps take them in turn; each
                requests its first before earlier kernels have ended, 16 bytes a lane
                and row straight into fragments
    previous    every CTA takes the largest of what the CTAs of the step before left, of
                each request, or the anchor: a warp a request. CTA 0 stores the token.
                W1[previous] goes into shared memory by asynchronous copy, while L2 is
                asked for the warps' second tiles
    multiply    W2 is the 16-row operand of m16n8k16, eight requests the columns; all
                columns of W2 in one chain. With the last eight requests each fragment
                makes way for the next tile's
    choose      base, noise, and a lane's best of each of its requests, in shared memory
    leave       the CTA's best of each request, for the next launch

Rows 2g and 2g + 1 of a tile are rows g and g + 8 of the products, so that a lane's two
logits are neighbours. A logit's bits depend on its own W2 row, e and base alone, and a
maximum on no order: so tokens depend neither on the other requests nor on the number of
CTAs. Among equal logits the lowest id is taken; a NaN is above all numbers, as it is to
torch. Requests past the last are columns that nobody stores.

Read once: W2, base. Early loads: the first tiles of W2. Dependents are released behind
the wait, so only one launch waits beside the one that runs. A launch writes one half of
``parts`` and reads the other, which the launch before has written.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from verify_kernels.common import ptx
from verify_kernels.common.arithmetic import halves
from verify_kernels.markov import noise
from verify_kernels.markov.host import MAX_CTAS
from verify_kernels.markov.host import MAX_REQUESTS as REQUESTS
from verify_kernels.skinny_gemm.device import STREAM

#: Requests of a product.
COLUMNS = 8
#: With noise fewer, so that each has the registers it needs.
WARPS, NOISED_WARPS = 8, 6
#: The next launch waits beside this one, its first weights in registers.
CTAS_PER_SM = 2
TILE = 16
#: Requests whose maxima a warp has under way.
GROUP = 4
PART_BYTES = 8 * MAX_CTAS
LOWEST = -(2**31)
#: Of a lane that has no row.
NOBODY = 2**31 - 1
INFINITY_BITS = 0x7F800000
MINUS_INFINITY_BITS = 0xFF800000 - 2**32


def order(value):
    """An Int32 in the order of Float32 numbers, both zeros equal, NaN above all."""
    bits = ptx.float_bits(value + Float32(0.0))
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    is_nan = (bits & 0x7FFFFFFF) > INFINITY_BITS
    return cutlass.select_(is_nan, Int32(NOBODY), ordered)


def better(one, other):
    """Of two (order, -1 - id) the larger: the lower id of two that are equal."""
    first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] >= other[1]))
    return tuple(cutlass.select_(first, a, b) for a, b in zip(one, other, strict=True))


class MarkovKernel:
    """One rank, one dtype of base, with noise or without, for any N, B and V.

    Args:
        rank: R, a multiple of 32 up to 256.
        wide: base is fp32.
        noised: requests may have a temperature.
    """

    pdl = True
    early_release = "dependents wait before they read what this kernel stores"
    early_loads = ("w2",)

    def __init__(self, rank: int, wide: bool, noised: bool):
        self.rank = rank
        self.wide = wide
        self.noised = noised
        self.warps = NOISED_WARPS if noised else WARPS
        self.threads = 32 * self.warps
        self.chunks = rank // 32
        self.row_bytes = 2 * rank
        #: Bytes of a logit; words of two.
        self.size = 4 if wide else 2
        self.words = 2 if wide else 1
        more = ("temperature", "seeds", "states", "positions", "kept")
        self.parameters = (
            *("base", "w1", "w2", "anchor", "parts", "tokens"),
            *(more if noised else ()),
        )
        # Shared memory: e of all requests, at a pitch at which the 16-byte reads of a
        # quarter warp meet all banks once; what is drawn for each request (hash,
        # temperature, where its logits go); the warps' best of each; and of each warp
        # what it reads of ``parts``, whose place a lane's best take afterwards.
        odd = self.row_bytes % 128 == 64
        self.pitch = self.row_bytes if odd else self.row_bytes + 64
        self.draws_at = REQUESTS * self.pitch
        self.best_at = self.draws_at + 16 * REQUESTS
        self.warps_at = self.best_at + 8 * REQUESTS * self.warps
        self.shared_bytes = self.warps_at + GROUP * PART_BYTES * self.warps

    @cute.jit
    def __call__(
        self,
        base: cute.Tensor,  # [B, N, V]
        w1: cute.Tensor,  # bf16 [V1, R]
        w2: cute.Tensor,  # bf16 [V, R]
        anchor: cute.Tensor,  # int32 [B]
        parts: cute.Tensor,  # int32 [2, 64, 192, 2]: order and -1 - id
        tokens: cute.Tensor,  # int64 [B, N]
        temperature,  # fp32 [states]
        seeds,  # int64 [states]
        states,  # int64 [B, N]
        positions,  # int64 [B, N]
        kept,  # as base, [states, N', V']
        keeps: Int32,
        step: Int32,
        sources: Int32,
        ctas: Int32,
        pdl: Int32,
        stream,
    ):
        tiles = (base.shape[2] + (TILE - 1)) // TILE
        tiles = cutlass.select_(step < base.shape[1], Int32(tiles), Int32(0))
        run = Int32(Uint32(tiles) // Uint32(ctas))
        self.kernel(
            base,
            w1,
            w2,
            anchor,
            parts,
            tokens,
            temperature,
            seeds,
            states,
            positions,
            kept,
            keeps,
            step,
            sources,
            run,
            tiles - run * ctas,
        ).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared_bytes,
            stream=stream,
            use_pdl=pdl,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        base: cute.Tensor,
        w1: cute.Tensor,
        w2: cute.Tensor,
        anchor: cute.Tensor,
        parts: cute.Tensor,
        tokens: cute.Tensor,
        temperature,
        seeds,
        states,
        positions,
        kept,
        keeps: Int32,
        step: Int32,
        sources: Int32,
        run: Int32,
        longer: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = thread >> 5
        g = lane >> 2
        q = lane & 3
        here = run + Int32(block < longer)
        first = (block * run + cutlass.min(block, longer)) * TILE
        end = cutlass.min(first + here * TILE, base.shape[2])
        row = first + warp * TILE + 2 * g
        w_at = w2.iterator.toint() + Int64(row) * self.row_bytes + 16 * q
        weights = cute.make_rmem_tensor((8 * self.chunks,), Int32)
        live = Int32(row < end)
        for c in cutlass.range_constexpr(self.chunks):
            for h in cutlass.range_constexpr(2):
                self.refill(weights, w_at, live, c, h, ())
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        at = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=16).toint()
        own = at + self.warps_at + GROUP * PART_BYTES * warp
        then = row + self.warps * TILE - 2 * g
        if (lane == 0) & (then < end):
            count = cutlass.min(end - then, Int32(TILE))
            ptx.bulk_prefetch(
                w2.iterator.toint() + Int64(then) * self.row_bytes,
                count * self.row_bytes,
            )
        requests = base.shape[0]
        for turn in cutlass.range(0, requests, self.warps * GROUP, unroll=1):
            self.ask(parts, own, turn + warp, requests, step, sources, lane)
            if const_expr(self.noised):  # noqa: SIM102
                if (turn == 0) & (here > 0):
                    # The last warps: the first have a request of their own.
                    self.draw(
                        at, self.threads - 1 - thread, requests, temperature, seeds,
                        states, positions, kept, keeps, step,
                    )  # fmt: skip
            ptx.wait_copies(0)
            for j in cutlass.range_constexpr(GROUP):
                request = turn + self.warps * j + warp
                if request < requests:
                    token = Int32(0)
                    if sources > 0:
                        token = self.largest(own + PART_BYTES * j, sources, lane)
                    else:
                        token = anchor[request]
                    # A row that exists, whatever an anchor is.
                    last = Uint32(w1.shape[0] - 1)
                    token = Int32(cutlass.min(Uint32(token), last))
                    if (block == 0) & (lane == 0) & (step > 0):
                        tokens[request, step - 1] = Int64(token)
                    ptx.copy_async_128_if(
                        at + self.pitch * request + 16 * lane,
                        w1.iterator.toint() + Int64(token) * self.row_bytes + 16 * lane,
                        Int32((lane < self.row_bytes // 16) & (here > 0)),
                    )
            ptx.commit_copies()
        ptx.wait_copies(0)
        cute.arch.sync_threads()

        if here > 0:
            groups = (requests + COLUMNS - 1) // COLUMNS
            mine = own + 16 * lane
            name = cutlass.select_(row < end, row, Int32(NOBODY))
            least = Int32(MINUS_INFINITY_BITS)
            for n in cutlass.range(groups, unroll=1):
                ptx.store_shared_128_if(
                    mine + 512 * n, Int32(1), (least, least, name, name)
                )
            logits_at = base.iterator.toint() + Int64(step) * base.stride[1] * self.size
            held = cute.make_rmem_tensor((2 * self.words,), Int32)
            held.fill(0)
            self.fetch(held, base, logits_at, row, end, 2 * q)
            for _ in cutlass.range(warp, here, self.warps, unroll=1):
                following = row + self.warps * TILE
                w_at = w_at + self.warps * TILE * self.row_bytes
                for n in cutlass.range(groups - 1, unroll=1):
                    acc = self.multiply(weights, at, n, g, q, w_at, Int32(0), False)
                    self.choose(
                        acc, held, at, mine, n, q, row, end, requests,
                        base, logits_at, row, n + 1,
                    )  # fmt: skip
                acc = self.multiply(
                    weights, at, groups - 1, g, q, w_at, Int32(following < end), True
                )
                self.choose(
                    acc, held, at, mine, groups - 1, q, row, end, requests,
                    base, logits_at, following, Int32(0),
                )  # fmt: skip
                row = following
            self.leave(at, mine, groups, warp, lane)
            cute.arch.sync_threads()
            if thread < requests:
                self.store(at, parts, thread, block, step)

    def refill(self, weights, at, live, c, h, old):
        """A chunk of 32 columns of one of a lane's rows, where there is one."""
        words = ptx.load_global_128_if(
            at, live, 64 * c + self.row_bytes * h, old, hint=STREAM
        )
        for i in range(4):
            weights[8 * c + 4 * h + i] = words[i]

    @cute.jit
    def ask(self, parts, own, first, requests, step, sources, lane):
        """Copies what the step before left of this warp's next requests."""
        half = (step - 1) & 1
        for j in cutlass.range_constexpr(GROUP):
            request = first + self.warps * j
            source = parts.iterator.toint() + Int64(16) * lane
            source = source + Int64(half * REQUESTS + request) * PART_BYTES
            for i in cutlass.range_constexpr(PART_BYTES // 512):
                ptx.copy_async_128_if(
                    own + 16 * lane,
                    source,
                    Int32((request < requests) & (2 * lane + 64 * i < sources)),
                    PART_BYTES * j + 512 * i,
                    512 * i,
                )
        ptx.commit_copies()

    @cute.jit
    def largest(self, place, sources, lane):
        """Id of the largest of all CTAs; each lane reads what it has copied."""
        best = (Int32(LOWEST), Int32(LOWEST))
        for i in cutlass.range_constexpr(PART_BYTES // 512):
            words = ptx.load_shared_128(place + 16 * lane, 512 * i)
            for j in cutlass.range_constexpr(2):
                there = 2 * lane + 64 * i + j < sources
                other = tuple(
                    cutlass.select_(there, word, Int32(LOWEST))
                    for word in words[2 * j : 2 * j + 2]
                )
                best = better(best, other)
        top = cute.arch.warp_redux_sync(best[0], "max")
        name = cutlass.select_(best[0] == top, best[1], Int32(LOWEST))
        return -1 - cute.arch.warp_redux_sync(name, "max")

    @cute.jit
    def draw(
        self, at, request, requests, temperature, seeds, states, positions, kept,
        keeps, step,
    ):  # fmt: skip
        """What a request's noise begins with; where its logits go, 0 for nowhere."""
        if request < requests:
            index = states[request, step]
            position = positions[request, step]
            h, heat, to = Int32(0), Float32(0.0), Int64(0)
            if index >= 0:
                heat = temperature[index]
                seed = seeds[index]
                seed = seed ^ (Int64(step * keeps) << Int64(32))
                h = Int32(noise.begin(seed, position))
                if keeps != 0:
                    to = index * kept.stride[0] + Int64(step) * kept.stride[1]
                    to = kept.iterator.toint() + to * self.size
            words = (h, ptx.float_bits(heat), Int32(to), Int32(to >> Int64(32)))
            there = at + self.draws_at + 16 * request
            ptx.store_shared_128_if(there, Int32(1), words)

    @cute.jit
    def fetch(self, held, base, logits_at, row, end, request):
        """Base of a lane's two rows and of two requests, where there are such."""
        for i in cutlass.range_constexpr(2):
            there = (row < end) & (request + i < base.shape[0])
            offset = Int64(request + i) * base.stride[0] + Int64(row)
            words = ptx.load_global_words_if(
                logits_at + offset * self.size,
                Int32(there),
                tuple(held[self.words * i + j] for j in range(self.words)),
            )
            for j in cutlass.range_constexpr(self.words):
                held[self.words * i + j] = words[j]

    @cute.jit
    def multiply(
        self, weights, at, n, g, q, next_at, next_live, last: cutlass.Constexpr
    ):
        """A tile with the n-th eight requests; the last lets the next tile in."""
        acc = (Float32(0.0),) * 4
        e_at = at + (COLUMNS * n + g) * self.pitch + 16 * q
        for c in cutlass.range_constexpr(self.chunks):
            e = ptx.load_shared_128(e_at, 64 * c)
            low, high = (
                tuple(weights[8 * c + 4 * h + i] for i in range(4)) for h in range(2)
            )
            for j in cutlass.range_constexpr(2):
                acc = ptx.mma_16816(
                    (low[2 * j], high[2 * j], low[2 * j + 1], high[2 * j + 1]),
                    (e[2 * j], e[2 * j + 1]),
                    acc,
                )
            if const_expr(last):
                self.refill(weights, next_at, next_live, c, 0, low)
                self.refill(weights, next_at, next_live, c, 1, high)
        return acc

    @cute.jit
    def choose(
        self, acc, held, at, mine, n, q, row, end, requests, base, logits_at, next_row,
        next_n,
    ):  # fmt: skip
        """Logits of a lane's two rows and two requests; the best so far."""
        request = COLUMNS * n + 2 * q
        words, logits = [], []
        for i in cutlass.range_constexpr(2):
            bias = halves(ptx.pack_bf16x2(acc[i], acc[2 + i]))
            if const_expr(self.wide):
                pair = [ptx.float_from_bits(held[2 * i + h]) + bias[h] for h in (0, 1)]
                words.append([ptx.float_bits(value) for value in pair])
            else:
                given = halves(held[i])
                word = ptx.pack_bf16x2(given[0] + bias[0], given[1] + bias[1])
                words.append([word])
                pair = halves(word)
            logits.append(list(pair))
        # Base has been used, so its registers are free for the next.
        self.fetch(held, base, logits_at, next_row, end, COLUMNS * next_n + 2 * q)
        there = row < end
        if const_expr(self.noised):
            for i in cutlass.range_constexpr(2):
                logits[i] = self.noisy(
                    logits[i], words[i], at, request + i, requests, row, there
                )
        best = ptx.load_shared_128(mine + 512 * n)
        values = [ptx.float_from_bits(best[i]) for i in range(2)]
        names = [best[2 + i] for i in range(2)]
        for i in cutlass.range_constexpr(2):
            for h in cutlass.range_constexpr(2):
                value = logits[i][h]
                above = (value > values[i]) | (value != value)
                takes = above & (values[i] == values[i]) & there
                values[i] = cutlass.select_(takes, value, values[i])
                names[i] = cutlass.select_(takes, row + h, names[i])
        found = (*(ptx.float_bits(value) for value in values), *names)
        ptx.store_shared_128_if(mine + 512 * n, Int32(1), found)

    @cute.jit
    def noisy(self, logits, words, at, request, requests, row, there):
        """Two logits of a request as they are compared; before that they are stored
        where they are wanted."""
        low, high = logits
        h, heat, to, to_high = ptx.load_shared_128(at + self.draws_at + 16 * request)
        heat = ptx.float_from_bits(heat)
        real = request < requests
        wanted = real & there & ((to | to_high) != 0)
        if wanted:
            place = (Int64(to_high) << Int64(32)) | Int64(Uint32(to))
            ptx.store_global_words(place + Int64(row) * self.size, words)
        warm = real & (heat != Float32(0.0))
        if cute.arch.vote_any_sync(warm):
            drawn = []
            for i in cutlass.range_constexpr(2):
                key = noise.scrambled(Uint32(row + i))
                drawn.append(
                    noise.noise_log(noise.finished(noise.mixed(Uint32(h), key)))
                )
            low = cutlass.select_(warm, ptx.divide_full(low, heat) - drawn[0], low)
            high = cutlass.select_(warm, ptx.divide_full(high, heat) - drawn[1], high)
        return [low, high]

    @cute.jit
    def leave(self, at, mine, groups, warp, lane):
        """This warp's best of every request, for the CTA."""
        for n in cutlass.range(groups, unroll=1):
            kept = ptx.load_shared_128(mine + 512 * n)
            words = []
            for i in cutlass.range_constexpr(2):
                name = kept[2 + i]
                value = order(ptx.float_from_bits(kept[i]))
                value = cutlass.select_(name == NOBODY, Int32(LOWEST), value)
                best = (value, -1 - name)
                for bit in (4, 8, 16):
                    other = tuple(
                        cute.arch.shuffle_sync_bfly(word, offset=bit) for word in best
                    )
                    best = better(best, other)
                words += best
            there = at + self.best_at + 8 * (REQUESTS * warp + COLUMNS * n) + 16 * lane
            ptx.store_shared_128_if(there, Int32(lane < 4), words)

    @cute.jit
    def store(self, at, parts, request, block, step):
        """The CTA's best of a request, for the next launch."""
        best = (Int32(LOWEST), Int32(LOWEST))
        for w in cutlass.range_constexpr(self.warps):
            there = at + self.best_at + 8 * (REQUESTS * w + request)
            best = better(best, ptx.load_shared_64(there))
        place = Int64((step & 1) * REQUESTS + request) * PART_BYTES + Int64(8) * block
        ptx.store_global_64(parts.iterator.toint() + place, best)
