"""Rules for attention and embeddings: standard ONNX operators, and operators that ONNX Runtime's optimiser creates."""

from __future__ import annotations

from penstock.rows.call import MICROSOFT, Call, Facts, rule
from penstock.rows.facts import Fact, stop
from penstock.rows.sizes import BATCH, Number


def _first_axis(call: Call, *positions: int) -> Number:
    """The size of the first axis of these inputs. The batch axis of an input, if any, must be its first axis."""
    found = [fact for position in positions if (fact := call.get(position)) is not None]
    for fact in found:
        call.mixes(fact, *range(1, fact.rank))
        if fact.shape[0] != found[0].shape[0]:
            stop("combines rows with other rows, or with constants")
    return found[0].shape[0]


def _mask(call: Call, position: int, rank: int) -> None:
    """Raise Dependent unless the input is absent, a constant, or a mask of ``rank`` axes whose first axis is the batch axis."""
    fact = call.get(position)
    if fact is None or (fact.rank <= rank and not fact.is_rows and (fact.rank < rank or fact.shape[0] == 1)):
        return
    if fact.rank != rank or fact.axis != 0 or fact.shape[0] != BATCH:
        stop(f"has a mask '{call.node.inputs[position]}' in an unsupported form")


@rule("Attention")
def attention(call: Call) -> Facts:
    """The inputs are [batch, length, features], or [batch, heads, length, features]."""
    rows, query = _first_axis(call, 0, 1, 2, 4, 5), call[0]
    _mask(call, 3, 4)
    if call.get(6) is not None or (call.get(3) is not None and rows != BATCH):
        stop("has lengths or a mask in an unsupported form")
    shape = [rows, *query.shape[1:-1], call.unknown()]
    present = Fact([rows, *(call.unknown() for _ in range(3))])
    return [Fact(shape), present, present, present]


@rule("MultiHeadAttention", domain=MICROSOFT)
def multi_head(call: Call) -> Facts:
    rows = _first_axis(call, 0, 1, 2)
    call.constants(3)
    _mask(call, 5, 4)
    lengths = call.get(4)
    if lengths is not None and (lengths.rank < 2 or lengths.axis != 0 or lengths.shape[0] != rows):
        stop("has a mask in an unsupported form")
    if rows != BATCH or any(fact is not None for fact in call.inputs[6:]):
        stop("has inputs in an unsupported form")
    return [Fact([rows, call[0].shape[1], call.unknown()])]


@rule("Attention", domain=MICROSOFT)
def packed_attention(call: Call) -> Facts:
    """A mask with one axis is not supported, because its meaning depends on its values."""
    rows = _first_axis(call, 0)
    call.constants(1, 2)
    mask = call.get(3)
    if mask is not None and (mask.rank < 2 or mask.axis != 0 or mask.shape[0] != rows):
        stop("has a mask in an unsupported form")
    _mask(call, 5, 4)
    if rows != BATCH or any(fact is not None for fact in (call.get(4), *call.inputs[6:])):
        stop("has inputs in an unsupported form")
    return [Fact([rows, call[0].shape[1], call.unknown()])]


@rule("EmbedLayerNormalization", domain=MICROSOFT)
def embedding(call: Call) -> Facts:
    """The inputs are words, segments, mask and positions, each [batch, length]."""
    rows = _first_axis(call, 0, 1, 7)
    call.constants(2, 3, 4, 5, 6)
    places = call.get(8)
    if places is not None and places.shape[0] not in {1, rows}:
        stop("takes the positions of each row from a constant")
    found = Fact([rows, call[0].shape[1], call[2].shape[-1]])
    return [found, Fact([rows]), found]
