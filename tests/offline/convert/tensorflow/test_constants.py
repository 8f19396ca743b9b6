"""Which tensors of a graph depend on no input. The graphs are stand-ins with the members of TensorFlow's that are read."""

from types import SimpleNamespace

from penstock.offline.convert.tensorflow.constants import fixed


class Graph:
    """A ``tf.Graph`` of operators with one output each, ``NAME:0``."""

    def __init__(self):
        self.ops, self.tensors = [], {}

    def add(self, name, kind, *inputs, elements=4, is_floating=True, is_stateful=False, after=()):
        tensor = SimpleNamespace(
            name=f"{name}:0",
            dtype=SimpleNamespace(is_floating=is_floating),
            shape=SimpleNamespace(num_elements=lambda: elements),
        )
        self.tensors[name] = tensor
        given = [self.tensors[one] for one in inputs]
        traits = SimpleNamespace(is_stateful=is_stateful)
        self.ops.append(
            SimpleNamespace(
                name=name, type=kind, inputs=given, outputs=[tensor], op_def=traits, control_inputs=list(after)
            )
        )

    def get_operations(self):
        return self.ops

    def is_fetchable(self, tensor):
        return True


def test_constants_and_their_parts_are_stored_and_results_are_computed():
    graph = Graph()
    graph.add("x", "Placeholder")
    graph.add("w", "Const")
    graph.add("part", "StridedSlice", "w")
    graph.add("gain", "Mul", "part", "w")
    graph.add("moved", "Transpose", "gain")
    graph.add("y", "MatMul", "x", "gain")
    assert fixed(graph) == (("w:0", "part:0"), ("gain:0", "moved:0"))


def test_scalars_integers_states_and_branches_are_left_out():
    graph = Graph()
    graph.add("scalar", "Const", elements=1)
    graph.add("axes", "Const", is_floating=False)
    graph.add("w", "Const")
    graph.add("noise", "RandomUniform", "axes", is_stateful=True)
    graph.add("later", "Identity", "w", after=["noise"])
    graph.add("branch", "Switch", "w", "axes")
    graph.add("scaled", "Mul", "w", "scalar")
    assert fixed(graph) == (("w:0",), ("scaled:0",))
