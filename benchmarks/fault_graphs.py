"""Small ONNX graphs with the operators into which faults are injected, as exporters write them."""

from __future__ import annotations

import re

import numpy as np
import onnx
from onnx import numpy_helper, parser

from penstock.offline.optimize.names import reads
from penstock.tensor import Array

_HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'
_WEIGHT = re.compile(r"\$(\w+)\[([\d,]+)\]")

GRAPHS = {
    "resnet": """g (float[N,3,12,12] image) => (float[N,5] scores) {
        c1 = Conv<pads=[1,1,1,1]>(image, $w1[8,3,3,3], $b1[8])
        n1 = BatchNormalization(c1, $s1[8], $t1[8], $m1[8], $v1[8])
        r1 = Relu(n1)
        p1 = MaxPool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1]>(r1)
        c2 = Conv<pads=[1,1,1,1],group=4>(p1, $w2[8,2,3,3])
        r2 = Clip(c2, $lo[1], $hi[1])
        c3 = Conv<pads=[1,1,1,1]>(r2, $w3[8,8,3,3], $b3[8])
        a = Add(c3, p1)
        l = LeakyRelu<alpha=0.1>(a)
        p2 = AveragePool<kernel_shape=[3,3],strides=[2,2],pads=[1,1,1,1]>(l)
        q = GlobalAveragePool(p2)
        f = Flatten(q)
        scores = Gemm<transB=1>(f, $w4[5,8], $b4[5]) }""",
    "upsample": """g (float[N,4,6,6] image) => (float[N,2,24,24] masks) {
        c1 = Conv<pads=[1,1,1,1]>(image, $w1[8,4,3,3], $b1[8])
        h = HardSigmoid<alpha=0.2>(c1)
        d = DepthToSpace<blocksize=2,mode="DCR">(c1)
        e = DepthToSpace<blocksize=2>(h)
        t = Concat<axis=1>(d, e)
        u = ConvTranspose<strides=[2,2],pads=[1,1,1,1],output_padding=[1,1]>(t, $w2[4,3,3,3], $b2[3])
        i = InstanceNormalization(u, $s1[3], $t1[3])
        r = Resize<mode="linear",coordinate_transformation_mode="half_pixel">(d, , scales2)
        s = Concat<axis=1>(i, r)
        masks = Conv<pads=[2,2,2,2],dilations=[1,1]>(s, $w3[2,5,5,5]) }""",
    "encoder": """g (int64[N,T] ids) => (float[N,T,8] hidden) {
        e = Gather<axis=0>($table[20,8], ids)
        n = LayerNormalization<axis=-1,epsilon=0.00001>(e, $s1[8], $t1[8])
        q = MatMul(n, $wq[8,8])
        k = MatMul(n, $wk[8,8])
        v = MatMul(n, $wv[8,8])
        kt = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, kt)
        d = Mul(s, scale)
        a = Softmax<axis=-1>(d)
        c = MatMul(a, v)
        o = MatMul(c, $wo[8,8])
        r = Add(o, e)
        n2 = LayerNormalization<axis=-1,epsilon=0.00001>(r, $s2[8], $t2[8])
        f = MatMul(n2, $w1[8,16])
        g1 = Gelu<approximate="none">(f)
        h = MatMul(g1, $w2[16,8])
        hb = Add(h, $b2[8])
        hidden = Add(hb, r) }""",
    "decomposed": """g (float[N,6,8] x) => (float[N,6,8] y) {
        m = ReduceMean<keepdims=1>(x, last)
        d = Sub(x, m)
        p = Pow(d, two)
        v = ReduceMean<keepdims=1>(p, last)
        ve = Add(v, small)
        s = Sqrt(ve)
        n = Div(d, s)
        w = Mul(n, $s0[8])
        b = Add(w, $b0[8])
        q = MatMul(b, $w1[8,8])
        z = Div(q, root)
        e = Erf(z)
        o = Add(e, one)
        g1 = Mul(q, o)
        g2 = Mul(g1, half)
        y = MatMul(g2, $w2[8,8]) }""",
    "recurrent": """g (float[T,N,4] x) => (float[T,1,N,5] y, float[1,N,5] h, float[T,1,N,3] z) {
        y, h, c = LSTM<hidden_size=5>(x, $w1[1,20,4], $r1[1,20,5], $b1[1,40])
        s = Squeeze(y, one_i)
        z, zh = GRU<hidden_size=3,linear_before_reset=1>(s, $w2[1,9,5], $r2[1,9,3], $b2[1,18]) }""",
    "rounding": """g (float[N,8] x) => (float[N,8] y, float[N,8] c, float[N,4] t, int64[N,4] i, int64[N] k) {
        m = MatMul(x, $w[8,8])
        sc = Mul(m, three)
        r = Round(sc)
        f = Floor(sc)
        cl = Ceil(sc)
        md = Mod<fmod=1>(sc, two)
        a = Add(r, f)
        b = Add(a, cl)
        y = Add(b, md)
        c = CumSum<exclusive=0>(m, one_s)
        t, i = TopK<largest=1>(m, four)
        k = ArgMax<axis=1,keepdims=0>(x) }""",
    "sampling": """g (float[N,3,6,6] image, float[N,5,5,2] grid) => (float[N,3,6,5] y, float[N,3,3,3] z) {
        u = Tanh(grid)
        s = GridSample<mode="linear",align_corners=0>(image, u)
        p = Pad<mode="constant">(s, pads8, zero)
        e = Einsum<equation="nchw,cd->ndhw">(p, $w[3,3])
        y = Slice(e, start, end, axes, ones)
        z = Resize<mode="nearest",axes=[2,3],nearest_mode="floor",coordinate_transformation_mode="asymmetric">(y, , , sizes) }""",
    "masked": """g (float[N,4,4] x) => (float[N,4,4] y, bool[N,4,4] b) {
        t = Trilu<upper=0>(x)
        b = Greater(t, zero)
        s = Selu(x)
        w = Where(b, s, x)
        l = LogSoftmax<axis=-1>(w)
        e = Elu<alpha=1.0>(l)
        q1, q2 = Split<axis=1,num_outputs=2>(e)
        y = Concat<axis=1>(q2, q1) }""",
    "reduced": """g (float[N,6,8] x) => (float[N,8] y, float[N,3,8] p) {
        s = ReduceSum<keepdims=0>(x, middle)
        m = ReduceMax<keepdims=0>(x, middle)
        y = Sub(s, m)
        p = Gather<axis=1>(x, picks) }""",
    "quantised": """g (float[N,6] x) => (float[N,4] y) {
        q = QuantizeLinear(x, qs, qz)
        d = DequantizeLinear(q, qs, qz)
        wd = DequantizeLinear(qw, ws)
        m = MatMul(d, wd)
        r = Relu(m)
        q2 = QuantizeLinear(r, qs2, qz)
        y = DequantizeLinear(q2, qs2, qz) }""",
    "quantised_net": """g (float[N,3,8,8] x) => (int8[N,6] y) {
        q = QuantizeLinear(x, qs, qz)
        d = DequantizeLinear(q, qs, qz)
        c1 = Conv<pads=[1,1,1,1]>(d, $w1[8,3,3,3], $b1[8])
        r1 = Relu(c1)
        q1 = QuantizeLinear(r1, qs, qz)
        d1 = DequantizeLinear(q1, qs, qz)
        c2 = Conv<pads=[1,1,1,1]>(d1, $w2[8,8,3,3], $b2[8])
        q2 = QuantizeLinear(c2, qs, qz)
        d2 = DequantizeLinear(q2, qs, qz)
        a = Add(d2, d1)
        q3 = QuantizeLinear(a, qs2, qz)
        d3 = DequantizeLinear(q3, qs2, qz)
        p = AveragePool<kernel_shape=[4,4],strides=[4,4]>(d3)
        q4 = QuantizeLinear(p, qs, qz)
        d4 = DequantizeLinear(q4, qs, qz)
        f = Flatten(d4)
        g1 = Gemm<transB=1>(f, $w4[6,32], $b4[6])
        y = QuantizeLinear(g1, qs, qz) }""",
    "half_mlp": """g (float[N,16] x) => (float[N,8] y) {
        m = MatMul(x, $w1[16,32])
        a = Add(m, $b1[32])
        r = Relu(a)
        m2 = MatMul(r, $w2[32,32])
        a2 = Add(m2, $b2[32])
        r2 = Gelu(a2)
        m3 = MatMul(r2, $w3[32,8])
        y = Add(m3, $b3[8]) }""",
    "half_branch": """g (float[N,8] x) => (float[N,8] y) {
        s = ReduceSum<keepdims=0>(x)
        b = Greater(s, zero)
        y = If(b) <
            then_branch = t () => (yt) {
                h = Cast<to=10>(x)
                wh = Cast<to=10>($w1[8,8])
                m = MatMul(h, wh)
                g1 = Tanh(m)
                m2 = MatMul(g1, wh)
                yt = Cast<to=1>(m2) },
            else_branch = e () => (ye) {
                h2 = Cast<to=10>(x)
                w2h = Cast<to=10>($w2[8,8])
                m3 = MatMul(h2, w2h)
                g2 = Sigmoid(m3)
                ye = Cast<to=1>(g2) }
        > }""",
    "half_loop": """g (float[N,8] x) => (float[N,8] y) {
        y = Loop(five, , x) <
            body = l (int64 number, bool going, float[N,8] state) => (bool again, float[N,8] next) {
                again = Identity(going)
                h = Cast<to=10>(state)
                wh = Cast<to=10>($w1[8,8])
                m = MatMul(h, wh)
                g1 = Tanh(m)
                next = Cast<to=1>(g1) }
        > }""",
}
GRAPHS |= {f"half_{name}": GRAPHS[name] for name in ("resnet", "encoder", "decomposed")}
_MIXED = ("half_branch", "half_loop")
"""Graphs that only compute in FP16 within a body."""
_CONSTANTS: dict[str, Array] = {
    "scales2": np.array([1, 1, 4, 4], np.float32)
    / np.array([1, 1, 2, 2], np.float32)
    * np.array([1, 1, 1, 1], np.float32),
    "scale": np.array(8**-0.5, np.float32),
    "last": np.array([-1]),
    "middle": np.array([1]),
    "picks": np.array([0, 2, 4]),
    "two": np.array(2, np.float32),
    "small": np.array(1e-5, np.float32),
    "root": np.array(2**0.5, np.float32),
    "one": np.array(1, np.float32),
    "half": np.array(0.5, np.float32),
    "three": np.array(3, np.float32),
    "zero": np.array(0, np.float32),
    "one_i": np.array([1]),
    "one_s": np.array(1),
    "four": np.array([4]),
    "five": np.array(5),
    "pads8": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    "start": np.array([0, 1]),
    "end": np.array([6, 6]),
    "axes": np.array([2, 3]),
    "ones": np.array([1, 1]),
    "sizes": np.array([3, 3]),
    "qs": np.array(0.03, np.float32),
    "qz": np.array(0, np.int8),
    "qs2": np.array(0.05, np.float32),
    "ws": np.array(0.01, np.float32),
}


def make(name: str, seed: int = 0) -> onnx.ModelProto:
    """The graph ``name`` with random weights."""
    rng = np.random.default_rng([seed, *name.encode()])
    arrays: dict[str, Array] = dict(_CONSTANTS, qw=rng.integers(-100, 100, (6, 4)).astype(np.int8))
    text = GRAPHS[name]
    for weight, sizes in _WEIGHT.findall(text):
        shape = tuple(map(int, sizes.split(",")))
        array = rng.standard_normal(shape) * np.prod(shape[1:] or (4,)) ** -0.5
        arrays[weight] = (np.abs(array) + 0.3 if weight[0] in "sv" else array).astype(np.float32)
    for bound, value in (("lo", 0.0), ("hi", 1.0)):
        arrays[bound] = np.array(value, np.float32)
    if name.startswith("half_") and name not in _MIXED:
        text = text.replace("float[", "float16[")
        arrays = {each: array.astype(np.float16) if array.dtype == "f" else array for each, array in arrays.items()}
    model: onnx.ModelProto = parser.parse_model(_HEADER + _WEIGHT.sub(r"\1", text))
    read = {each for node in model.graph.node for each in reads(node)}
    model.graph.initializer.extend(
        numpy_helper.from_array(array, each) for each, array in arrays.items() if each in read
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"/{node.op_type}_{number}"
    onnx.checker.check_model(model, full_check=True)
    return model
