"""The passes, one per file. ``default_passes`` returns the passes of every build, in order."""

from __future__ import annotations

from penstock.offline.optimize.base import Pass
from penstock.offline.optimize.passes.bias_folding import BiasFolding
from penstock.offline.optimize.passes.common_subexpression import CommonSubexpression
from penstock.offline.optimize.passes.constant_folding import ConstantFolding
from penstock.offline.optimize.passes.constant_inputs import ConstantInputs
from penstock.offline.optimize.passes.conv_batch_norm import ConvBatchNorm
from penstock.offline.optimize.passes.dead_code import DeadCode
from penstock.offline.optimize.passes.identity_elimination import IdentityElimination
from penstock.offline.optimize.passes.matmul_add import MatMulAdd


def default_passes() -> list[Pass]:
    """Inputs become constants first, and are then folded, since other passes need constants. Dead code removal runs last, since other
    passes leave unused nodes.
    """
    return [
        ConstantInputs(),
        ConstantFolding(),
        IdentityElimination(),
        CommonSubexpression(),
        MatMulAdd(),
        ConvBatchNorm(),
        BiasFolding(),
        DeadCode(),
    ]
