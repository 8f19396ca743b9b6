from penstock.offline.optimize.passes.dead_code import DeadCode


def test_removes_a_dead_branch_and_its_weights(parse, apply, weights):
    text = """agraph (float[N, 3] x) => (float[N, 3] y) {
        a = MatMul(x, w)
        b = Relu(a)
        y = Neg(x)
    }"""
    outcome = apply(DeadCode(), parse(text, w=weights(3, 3)))
    assert outcome.ops == ["Neg"]
    assert not outcome.constants


def test_keeps_a_node_of_which_one_output_is_read(parse, apply):
    text = """agraph (float[N, 4] x) => (float[N, 2] y) {
        a, b = Split<axis = 1>(x)
        y = Relu(b)
    }"""
    assert apply(DeadCode(), parse(text)).status == "unchanged"


def test_keeps_what_only_a_subgraph_reads(parse, apply, weights):
    text = """agraph (float[N, 3] x, bool flag) => (float[N, 3] y) {
        a = Relu(x)
        y = If (flag) <
            then_branch = t () => (float[N, 3] t1) { t1 = Mul(a, k) },
            else_branch = e () => (float[N, 3] e1) { e1 = Neg(a) }
        >
    }"""
    assert apply(DeadCode(), parse(text, k=weights(3))).status == "unchanged"


def test_keeps_a_dead_node_with_subgraphs(parse, apply):
    text = """agraph (float[N, 3] x, bool flag) => (float[N, 3] y) {
        dead = If (flag) <
            then_branch = t () => (float[N, 3] t1) { t1 = Relu(x) },
            else_branch = e () => (float[N, 3] e1) { e1 = Neg(x) }
        >
        y = Neg(x)
    }"""
    assert apply(DeadCode(), parse(text)).status == "unchanged"


def test_keeps_inputs_and_the_defaults_behind_them(parse, apply, weights):
    text = "agraph (float[N, 3] x, float[N, 3] unused, float[3] k) => (float[N, 3] y) { y = Neg(x) }"
    outcome = apply(DeadCode(), parse(text, k=weights(3)))
    assert outcome.status == "unchanged"
    assert [value.name for value in outcome.graph.input] == ["x", "unused", "k"]
