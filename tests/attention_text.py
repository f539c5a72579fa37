"""A program and a kernel of attention, as text: causal, in blocks of 16 by 16, of which some are allowed as a whole."""

PROGRAM = """\
def forward(q, k, v, count, place, full_count, full_place):
    q = input(f32, [2, 4, 40, 8], strides=[1280, 320, 8, 1])
    k = input(f32, [2, 2, 40, 8], strides=[640, 320, 8, 1])
    v = input(f32, [2, 2, 40, 6], strides=[480, 240, 6, 1])
    count = input(i32, [3], strides=[1])
    place = input(i32, [3, 3], strides=[3, 1])
    full_count = input(i32, [3], strides=[1])
    full_place = input(i32, [3, 3], strides=[3, 1])
    out = owned(f32, [2, 4, 40, 6], strides=[960, 240, 6, 1])
    lse = owned(f32, [2, 4, 40], strides=[160, 40, 1])
    with attention(axes(b=2, h=2), group(g=2), rows(m=40), keys(n=40), over(d=8), columns(e=6), entries(j0=3, j1=3), \
sides=[16, 16]):
        v0: f32 = q[b, g + 2*h, m, d]
        v1: f32 = k[b, h, n, d]
        v2: f32 = v[b, h, n, e]
        v3: f32 = param(0)
        v4: f32 = mul(v3, f32(0.5))
        v5: i64 = index(m)
        v6: i64 = index(n)
        v7: b8 = ge(v5, v6)
        v8: i32 = count[m // 16]
        v9: i32 = place[m // 16, j0]
        v10: i32 = full_count[m // 16]
        v11: i32 = full_place[m // 16, j1]
        key_blocks(v8, v9)
        key_blocks(v10, v11, whole=True)
        out[b, g + 2*h, m, e], lse[b, g + 2*h, m], _ = attended(v0, v1, v2, v4, v7)
    return out, lse
"""

KERNEL = """\
def kernel(out, q, k, v):
    out = pointer(f32, 'write')
    q = pointer(f32, 'read')
    k = pointer(f32, 'read')
    v = pointer(f32, 'read')
    warps = 4
    for b in parallel(2):
        for h in parallel(1):
            for g in parallel(2):
                for m in vector(20, lanes=16):
                    with attention(axes(b=2, h=1), group(g=2), rows(m=20), keys(n=20), over(d=8), columns(e=8), \
lanes=16, copies=2):
                        v0: f32 = q[320*b + d + 160*g + 8*m]
                        v1: f32 = k[160*b + d + 8*n]
                        v2: f32 = v[160*b + e + 8*n]
                        v3: f32 = param(0)
                        v4: i64 = index(m)
                        v5: i64 = index(n)
                        v6: b8 = ge(v4, v5)
                        out[320*b + e + 160*g + 8*m], _, _ = attended(v0, v1, v2, v3, v6)
"""
