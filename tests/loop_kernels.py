"""Kernels of the loop IR, written by hand as text."""

from __future__ import annotations

import textwrap


def text(source: str) -> str:
    return textwrap.dedent(source).lstrip()


POINTWISE = text("""
    def kernel(x, y, out, n):
        n = symbol(0, None)
        x = pointer(f32, 'read')
        y = pointer(bf16, 'read')
        out = pointer(f32, 'write')
        for i in parallel(n, copies=64):
            for j in vector(5, lanes=4):
                v0: f32 = x[5*i + j]
                v1: bf16 = y[j]
                v2: f32 = cast(v1)
                v3: f32 = mul(v0, v2)
                v4: f32 = sin(v3)
                out[5*i + j] = v4
""")

SOFTMAX = text("""
    def kernel(x, out, rows, n):
        rows = symbol(1, None)
        n = symbol(1, 4096)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(rows):
            row = scratch(f32, [n])
            with amax(f32) as most:
                for j in reduction(n, lanes=4, copies=4):
                    v0: f32 = x[i*n + j]
                    most.update(v0)
            with sum(f32) as total:
                for j in reduction(n, lanes=4, copies=2):
                    v1: f32 = x[i*n + j]
                    v2: f32 = sub(v1, most)
                    v3: f32 = exp(v2)
                    e: f32 = let(v3)
                    row[j] = e
                    total.update(e)
            for j in vector(n, lanes=4):
                v4: f32 = row[j]
                v5: f32 = div(v4, total)
                out[i*n + j] = v5
""")

ONLINE_SOFTMAX = text("""
    def kernel(x, out, n):
        n = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        with softmax(f32, f32) as (most, total):
            for j in reduction(n, lanes=4):
                v0: f32 = x[j]
                most.update(v0)
        for j in vector(n, lanes=4):
            v1: f32 = x[j]
            v2: f32 = sub(v1, most)
            v3: f32 = exp(v2)
            v4: f32 = div(v3, total)
            out[j] = v4
""")

TRANSPOSE = text("""
    def kernel(x, out, m, n):
        m = symbol(1, None)
        n = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for a in parallel((m + 3) // 4):
            for b in parallel((n + 3) // 4):
                tile = scratch(f32, [4, 4])
                for i in unrolled(4):
                    v0: i64 = index(4*a + i)
                    v1: i64 = index(m)
                    v2: b8 = lt(v0, v1)
                    if v2:
                        for j in vector(min(-4*b + n, 4), lanes=4):
                            v3: f32 = x[4*a*n + 4*b + i*n + j]
                            tile[i, j] = v3
                for j in serial(min(-4*b + n, 4)):
                    for i in vector(min(-4*a + m, 4), lanes=4):
                        v4: f32 = tile[i, j]
                        out[4*a + 4*b*m + i + j*m] = v4
""")

ARGMAX = text("""
    def kernel(x, values, places, rows, n):
        rows = symbol(1, None)
        n = symbol(1, None)
        x = pointer(f32, 'read')
        values = pointer(f32, 'write')
        places = pointer(i64, 'write')
        for i in parallel(rows):
            with argmax(f32, i64) as (best, where):
                for j in reduction(n, lanes=4, copies=2):
                    v0: f32 = x[i*n + j]
                    v1: i64 = index(j)
                    best.update(v0, v1)
            values[i] = best
            places[i] = where
""")

WELFORD = text("""
    def kernel(x, mean, variance, rows, n):
        rows = symbol(1, None)
        n = symbol(1, None)
        x = pointer(f32, 'read')
        mean = pointer(f32, 'write')
        variance = pointer(f32, 'write')
        for i in parallel(rows):
            with welford(f32, f32, f32) as (average, squares, count):
                for c in serial((n + 7) // 8):
                    with welford(f32, f32, f32) as (part, part_squares, part_count):
                        for j in reduction(min(-8*c + n, 8), lanes=4):
                            v0: f32 = x[8*c + i*n + j]
                            part.update(v0)
                    average.update(part, part_squares, part_count)
            mean[i] = average
            v1: f32 = div(squares, count)
            variance[i] = v1
""")

SCATTER_ADD = text("""
    def kernel(where, source, target, n):
        n = symbol(0, None)
        where = pointer(i64, 'read')
        source = pointer(f32, 'read')
        target = pointer(f32, 'both')
        for i in parallel(n):
            v0: i64 = where[i]
            row: i64 = let(v0)
            for j in vector(3, lanes=4):
                v1: f32 = source[3*i + j]
                target[3*data(row, 6) + j].atomic_add(v1)
""")

GATHER = text("""
    def kernel(where, source, out, n):
        n = symbol(0, None)
        where = pointer(i64, 'read')
        source = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4):
            v0: i64 = where[i]
            v1: b8 = ge(v0, i64(0))
            v2: f32 = source[data(v0, 6)]
            v3: f32 = masked(v1, v2, f32(-1.0))
            out[i] = v3
""")

CUMULATIVE = text("""
    def kernel(x, out, n):
        n = symbol(0, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        with sum(f32) as total:
            for j in serial(n):
                v0: f32 = x[j]
                total.update(v0)
                out[j] = total
""")

LINEAR_SCAN = text("""
    def kernel(x, y, out, n):
        n = symbol(0, None)
        x = pointer(f32, 'read')
        y = pointer(f32, 'read')
        out = pointer(f32, 'write')
        with own(f32, f32) as (a, b):
            with combine(a):
                v0: f32 = param(0)
                v1: f32 = param(2)
                v2: f32 = mul(v0, v1)
                v3: f32 = param(1)
                v4: f32 = mul(v3, v1)
                v5: f32 = param(3)
                v6: f32 = add(v4, v5)
                results(v2, v6)
            for j in serial(n):
                v7: f32 = x[j]
                v8: f32 = y[j]
                a.update(v7, v8)
                out[j] = b
""")

COLUMN_SUMS = text("""
    def kernel(x, out, squares, m, n):
        m = symbol(0, None)
        n = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        squares = pointer(f32, 'write')
        for j in vector(n, lanes=4):
            with sum(f32) as a, sum(f32) as b:
                for i in reduction(m, copies=4):
                    v0: f32 = x[i*n + j]
                    e: f32 = let(v0)
                    a.update(e)
                    v1: f32 = mul(e, e)
                    b.update(v1)
            out[j] = a
            squares[j] = b
""")

CENTRED = text("""
    def kernel(x, out, rows, n):
        rows = symbol(0, None)
        n = symbol(1, None)
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(rows):
            with sum(f32) as total:
                for j in reduction(n, lanes=4, copies=4):
                    v0: f32 = x[i*n + j]
                    total.update(v0)
            for k in vector(n, lanes=4, copies=2):
                prefetch(x[i*n + k + n])
                v1: f32 = x[i*n + k]
                v2: f32 = sub(v1, total)
                out[i*n + k] = v2
""")

RAGGED = text("""
    def kernel(ends, x, out, rows):
        rows = symbol(0, None)
        ends = pointer(i64, 'read')
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in parallel(rows):
            v0: i64 = ends[i]
            begin: i64 = let(v0)
            v1: i64 = ends[i + 1]
            v2: i64 = sub(v1, begin)
            many: i64 = let(v2)
            for j in vector(6, lanes=4, copies=2):
                with sum(f32) as total:
                    for k in serial(data(many, 5)):
                        v3: f32 = x[6*data(begin, 12) + j + 6*k]
                        total.update(v3)
                out[6*i + j] = total
""")

RAGGED_LANES = text("""
    def kernel(counts, x, out, n):
        n = symbol(0, None)
        counts = pointer(i64, 'read')
        x = pointer(f32, 'read')
        out = pointer(f32, 'write')
        for i in vector(n, lanes=4, copies=2):
            v0: i64 = counts[i]
            many: i64 = let(v0)
            with sum(f32) as total:
                for k in serial(data(many, 5)):
                    v1: f32 = x[4*i + k]
                    total.update(v1)
            out[i] = total
""")

KERNELS = {
    "pointwise": POINTWISE,
    "row softmax": SOFTMAX,
    "online softmax": ONLINE_SOFTMAX,
    "transposing copy": TRANSPOSE,
    "argmax": ARGMAX,
    "welford": WELFORD,
    "scatter-add": SCATTER_ADD,
    "gather": GATHER,
    "cumulative sum": CUMULATIVE,
    "linear scan": LINEAR_SCAN,
    "column sums": COLUMN_SUMS,
    "centred rows": CENTRED,
    "ragged rows": RAGGED,
    "ragged lanes": RAGGED_LANES,
}


def changed(source: str, old: str, new: str) -> str:
    """The source with one thing changed."""
    assert old in source
    return source.replace(old, new, 1)
