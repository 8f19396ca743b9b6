"""Rules for products, convolutions, pooling and recurrent networks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.rows.call import MICROSOFT, Call, Facts, rule
from penstock.rows.facts import Fact, Shape, broadcast, stop
from penstock.rows.sizes import Number, divide, minus, plus, times


def product_shape(call: Call, a: Fact, b: Fact) -> Shape:
    """The shape of ``a @ b``, by numpy's rules."""
    call.mixes(a, -1)
    call.mixes(b, -2 if b.rank > 1 else 0)
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    return (*lead, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))


@rule("MatMul", "MatMulInteger")
@rule("MatMulIntegerToFloat", "FusedMatMul", domain=MICROSOFT)
def matmul(call: Call) -> Fact:
    a, b = call[0], call[1]
    if call.operator == "FusedMatMul":
        if call.attribute("transBatchA", 0) or call.attribute("transBatchB", 0):
            stop("transposes the batch")
        a, b = _swapped(a, call.attribute("transA", 0)), _swapped(b, call.attribute("transB", 0))
    elif call.operator != "MatMul":
        call.singles(2, *((4,) if call.operator == "MatMulIntegerToFloat" else ()))
    call.constants(*range(2, len(call.inputs)))
    if b.is_rows:
        call.singles(*range(2, len(call.inputs)))
    return Fact(product_shape(call, a, b))


def _swapped(fact: Fact, is_transposed: int) -> Fact:
    return Fact((*fact.shape[:-2], fact.shape[-1], fact.shape[-2])) if is_transposed else fact


@rule("QLinearMatMul")
def quantized_matmul(call: Call) -> Fact:
    call.singles(1, 2, 6, 7)
    call.constants(4, 5)
    if call[3].is_rows:
        call.singles(4, 5)
    return Fact(product_shape(call, call[0], call[3]))


@rule("MatMulNBits", domain=MICROSOFT)
def matmul_bits(call: Call) -> Fact:
    call.constants(*range(1, len(call.inputs)))
    call.mixes(call[0], -1)
    return Fact((*call[0].shape[:-1], call.attribute("N", 0)))


@rule("Gemm")
@rule("FusedGemm", domain=MICROSOFT)
def gemm(call: Call) -> Fact:
    a, b = _swapped(call[0], call.attribute("transA", 0)), _swapped(call[1], call.attribute("transB", 0))
    shape = product_shape(call, a, b)
    bias = call.get(2)
    return Fact(broadcast(shape, bias.shape) if bias is not None else shape)


@rule("QGemm", domain=MICROSOFT)
def quantized_gemm(call: Call) -> Fact:
    call.singles(1, 2, 7, 8)
    call.constants(*range(3, len(call.inputs)))
    a, b = _swapped(call[0], call.attribute("transA", 0)), _swapped(call[3], call.attribute("transB", 0))
    return Fact(product_shape(call, a, b))


@rule("Einsum")
def einsum(call: Call) -> Fact:
    left, arrow, right = call.attribute("equation", "").replace(" ", "").replace("...", ".").partition("->")
    terms, ranks = left.split(","), [fact.rank if fact is not None else 0 for fact in call.inputs]
    if not arrow or len(terms) != len(ranks):
        stop("has an equation without '->'")
    hidden = [rank - len(term) + 1 if "." in term else 0 for term, rank in zip(terms, ranks, strict=True)]
    labels = "".join(chr(0x100 + place) for place in range(max(hidden)))
    terms = [term.replace(".", labels[len(labels) - count :]) for term, count in zip(terms, hidden, strict=True)]
    right = right.replace(".", labels)
    sizes: dict[str, list[Number]] = {}
    for position, term in enumerate(terms):
        if len(term) != call[position].rank:
            stop("has an equation that does not fit its inputs")
        for label, size in zip(term, call[position].shape, strict=True):
            sizes.setdefault(label, []).append(size)
    found = {label: broadcast(*((size,) for size in of))[0] for label, of in sizes.items()}
    for position, term in enumerate(terms):
        call.mixes(call[position], *(axis for axis, label in enumerate(term) if label not in right))
    return Fact(found[label] for label in right)


@rule("Conv", "ConvInteger")
@rule("FusedConv", domain=MICROSOFT)
def convolution(call: Call) -> Fact:
    others = range(1, 3 if call.operator == "FusedConv" else len(call.inputs))
    call.constants(*others)
    if call.operator == "ConvInteger":
        call.singles(2)
    shape = _convolved(call, call[0], call[1])
    added = call.get(3) if call.operator == "FusedConv" else None
    return Fact(broadcast(shape, added.shape) if added is not None else shape)


@rule("QLinearConv")
def quantized_convolution(call: Call) -> Fact:
    call.singles(1, 2, 6, 7)
    call.constants(*range(1, len(call.inputs)))
    return Fact(_convolved(call, call[0], call[3]))


def _convolved(call: Call, x: Fact, weight: Fact) -> Shape:
    call.mixes(x, *range(1, x.rank))
    return (x.shape[0], weight.shape[0], *windows(call, x, weight.shape[2:]))


@rule("ConvTranspose")
def transposed(call: Call) -> Fact:
    x, weight = call[0], call[1]
    call.constants(1, 2)
    call.mixes(x, *range(1, x.rank))
    is_plain = not call.attribute("output_shape") and call.attribute("auto_pad", "NOTSET") == "NOTSET"
    sides = _grown(call, x, weight.shape[2:]) if is_plain else [call.unknown() for _ in x.shape[2:]]
    return Fact([x.shape[0], times(weight.shape[1], call.attribute("group", 1)), *sides])


def _grown(call: Call, x: Fact, kernel: Sequence[Number]) -> list[Number]:
    count = x.rank - 2
    strides, dilations = call.attribute("strides") or (1,) * count, call.attribute("dilations") or (1,) * count
    pads, more = call.attribute("pads") or (0,) * 2 * count, call.attribute("output_padding") or (0,) * count
    found = []
    for axis, size in enumerate(x.shape[2:]):
        reach = plus(times(minus(kernel[axis], 1), dilations[axis]), 1 + more[axis] - pads[axis] - pads[axis + count])
        found.append(plus(times(minus(size, 1), strides[axis]), reach))
    return found


@rule("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
@rule("QLinearAveragePool", "QLinearGlobalAveragePool", domain=MICROSOFT)
def pool(call: Call) -> Facts:
    x = call[0]
    call.singles(1, 2, 3, 4)
    if call.attribute("channels_last", 0):
        stop("has a channels-last layout")
    call.mixes(x, *range(1, x.rank))
    is_global = "Global" in call.operator
    sides = [1] * (x.rank - 2) if is_global else windows(call, x, call.attribute("kernel_shape"))
    # The second output of MaxPool holds indices that count from the beginning of the batch.
    return [Fact([*x.shape[:2], *sides]), None]


def windows(call: Call, x: Fact, kernel: Sequence[Number]) -> list[Number]:
    """The output sizes of the axes along which a window slides."""
    count = x.rank - 2
    strides, dilations = call.attribute("strides") or (1,) * count, call.attribute("dilations") or (1,) * count
    pads, how = call.attribute("pads") or (0,) * 2 * count, call.attribute("auto_pad", "NOTSET")
    found: list[Number] = []
    for axis, size in enumerate(x.shape[2:]):
        stride = strides[axis]
        if how.startswith("SAME"):
            found.append(divide(plus(size, stride - 1), stride))
            continue
        padding = pads[axis] + pads[axis + count] if how == "NOTSET" else 0
        reach = plus(times(minus(kernel[axis], 1), dilations[axis]), 1)
        room = plus(size, minus(padding, reach))
        is_exact = stride == 1 or (isinstance(room, int) and room % stride == 0)
        rounds_up = call.attribute("ceil_mode", 0) and not is_exact
        found.append(call.unknown() if rounds_up else plus(divide(room, stride), 1))
    return found


@rule("RNN", "GRU", "LSTM")
def recurrent(call: Call) -> Facts:
    """X is [time, batch, features], or with ``layout`` 1 [batch, time, features]."""
    x, layout = call[0], call.attribute("layout", 0)
    call.constants(1, 2, 3, 7)
    call.mixes(x, layout, 2)
    time, batch = x.shape[layout], x.shape[1 - layout]
    # Inputs 4 and up are the lengths and the initial states.
    places = {4: 0, 5: 1 - layout, 6: 1 - layout}
    for position, axis in places.items():
        if (fact := call.get(position)) is not None and fact.shape[axis] != batch:
            stop(f"takes its input '{call.node.inputs[position]}' from a constant")
    directions, size = call[1].shape[0], call[2].shape[-1]
    if layout:
        state = [batch, directions, size]
        return [Fact([batch, time, directions, size]), Fact(state), Fact(state)]
    state = [directions, batch, size]
    return [Fact([time, directions, batch, size]), Fact(state), Fact(state)]
