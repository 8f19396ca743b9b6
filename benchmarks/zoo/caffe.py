"""Caffe: the structures of well-known networks with few channels and random weights, and networks of single layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.protocol.varint import write_varint
from penstock.tensor import Array, DataType


class Network:
    """Collects the text and the weights of a network."""

    def __init__(self, text: str = "", seed: int = 0) -> None:
        self.text = text
        self.weights: dict[str, list[Array]] = {}
        self._random = np.random.default_rng(seed)

    def add(
        self, name: str, kind: str, bottoms: str, text: str = "", tops: str = "", blobs: Sequence[Array] = ()
    ) -> str:
        """Add a layer, and return its output. ``bottoms`` and ``tops`` are separated by blanks."""
        links = "".join(f' bottom: "{one}"' for one in bottoms.split()) + "".join(
            f' top: "{one}"' for one in (tops or name).split()
        )
        self.text += f'layer {{ name: "{name}" type: "{kind}"{links} {text} }}\n'
        if blobs:
            self.weights[name] = list(blobs)
        return (tops or name).split()[0]

    def random(self, *shape: int) -> Array:
        """Weights that keep the scale of their inputs."""
        fan_in = np.prod(shape[1:]) if len(shape) > 1 else 4
        return self._random.normal(0, fan_in**-0.5, shape).astype(np.float32)

    def convolution(
        self,
        name: str,
        bottom: str,
        width: int,
        count: int,
        text: str,
        kernel: tuple[int, ...] = (3, 3),
        group: int = 1,
    ) -> str:
        blobs = [self.random(count, width // group, *kernel), self.random(count)]
        text = f"convolution_param {{ num_output: {count} group: {group} {text} }}"
        return self.add(name, "Convolution", bottom, text, blobs=blobs)

    def normalised(
        self,
        name: str,
        bottom: str,
        width: int,
        count: int,
        text: str,
        kernel: tuple[int, int] = (3, 3),
        group: int = 1,
    ) -> str:
        """Convolution without bias, BatchNorm, Scale and ReLU, the last three in place."""
        text = f"convolution_param {{ num_output: {count} group: {group} bias_term: false {text} }}"
        top = self.add(name, "Convolution", bottom, text, blobs=[self.random(count, width // group, *kernel)])
        statistics = [self.random(count), np.abs(self.random(count)) + 0.5, np.array([2.0], np.float32)]
        self.add(f"{name}_bn", "BatchNorm", top, "", top, statistics)
        self.add(
            f"{name}_scale",
            "Scale",
            top,
            "scale_param { bias_term: true }",
            top,
            [self.random(count) + 1, self.random(count)],
        )
        return self.add(f"{name}_relu", "ReLU", top, "", top)

    def dense(self, name: str, bottom: str, width: int, count: int) -> str:
        blobs = [self.random(count, width), self.random(count)]
        return self.add(name, "InnerProduct", bottom, f"inner_product_param {{ num_output: {count} }}", blobs=blobs)

    def write(self, folder: Path, name: str) -> Path:
        (folder / f"{name}.caffemodel").write_bytes(caffemodel(self.weights))
        (folder / f"{name}.prototxt").write_text(self.text)
        return folder / f"{name}.prototxt"


def _field(number: int, content: bytes) -> bytes:
    return write_varint(number << 3 | 2) + write_varint(len(content)) + content


def caffemodel(weights: Mapping[str, Sequence[Array]], *, is_old: bool = False) -> bytes:
    """A ``NetParameter`` with these blobs, in the current form or in the form V1, in which every blob has four dimensions."""
    found = b""
    for name, blobs in weights.items():
        layer = _field(4 if is_old else 1, name.encode())
        for blob in blobs:
            dims = blob.shape if not is_old else (1,) * (4 - blob.ndim) + blob.shape
            shape = (
                b"".join(write_varint(at << 3) + write_varint(dim) for at, dim in enumerate(dims, 1))
                if is_old
                else _field(7, _field(1, b"".join(map(write_varint, dims))))
            )
            layer += _field(6 if is_old else 7, shape + _field(5, blob.astype("<f4").tobytes()))
        found += _field(2 if is_old else 100, layer)
    return found


def _input(*dims: int, name: str = "data") -> str:
    shape = " ".join(f"dim: {dim}" for dim in dims)
    return f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape: {{ {shape} }} }} }}\n'


def _pool(net: Network, name: str, bottom: str, text: str) -> str:
    return net.add(name, "Pooling", bottom, f"pooling_param {{ {text} }}")


def _lenet() -> Network:
    net = Network(_input(64, 1, 28, 28))
    net.convolution("conv1", "data", 1, 4, "kernel_size: 5 stride: 1", (5, 5))
    _pool(net, "pool1", "conv1", "pool: MAX kernel_size: 2 stride: 2")
    net.convolution("conv2", "pool1", 4, 6, "kernel_size: 5 stride: 1", (5, 5))
    _pool(net, "pool2", "conv2", "pool: MAX kernel_size: 2 stride: 2")
    net.dense("ip1", "pool2", 96, 12)
    net.add("relu1", "ReLU", "ip1", tops="ip1")
    net.dense("ip2", "ip1", 12, 10)
    net.add("prob", "Softmax", "ip2")
    return net


def _alexnet() -> Network:
    net = Network('name: "AlexNet"\ninput: "data"\ninput_dim: 10\ninput_dim: 3\ninput_dim: 67\ninput_dim: 67\n')
    lrn = "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }"
    net.convolution("conv1", "data", 3, 8, "kernel_size: 11 stride: 4", (11, 11))
    net.add("relu1", "ReLU", "conv1", tops="conv1")
    net.add("norm1", "LRN", "conv1", lrn)
    _pool(net, "pool1", "norm1", "kernel_size: 3 stride: 2")
    net.convolution("conv2", "pool1", 8, 12, "pad: 2 kernel_size: 5", (5, 5), 2)
    net.add("relu2", "ReLU", "conv2", tops="conv2")
    net.add("norm2", "LRN", "conv2", "lrn_param { local_size: 3 alpha: 2 beta: 0.6 k: 1.5 }")
    _pool(net, "pool2", "norm2", "pool: MAX kernel_size: 3 stride: 2")
    net.convolution("conv3", "pool2", 12, 12, "pad: 1 kernel_size: 3")
    net.add("relu3", "ReLU", "conv3", tops="conv3")
    net.dense("fc6", "conv3", 108, 16)
    net.add("relu6", "ReLU", "fc6", tops="fc6")
    net.add("drop6", "Dropout", "fc6", "dropout_param { dropout_ratio: 0.5 }", "fc6")
    net.dense("fc8", "fc6", 16, 10)
    net.add("prob", "Softmax", "fc8")
    return net


def _inception(net: Network, name: str, bottom: str, width: int) -> str:
    tops = [net.convolution(f"{name}/1x1", bottom, width, 3, "kernel_size: 1", (1, 1))]
    for kernel, pad in ((3, 1), (5, 2)):
        reduced = net.convolution(f"{name}/{kernel}_reduce", bottom, width, 2, "kernel_size: 1", (1, 1))
        net.add(f"{name}/relu_{kernel}_reduce", "ReLU", reduced, tops=reduced)
        tops.append(
            net.convolution(f"{name}/{kernel}", reduced, 2, 3, f"kernel_size: {kernel} pad: {pad}", (kernel, kernel))
        )
    pooled = _pool(net, f"{name}/pool", bottom, "pool: MAX kernel_size: 3 stride: 1 pad: 1")
    tops.append(net.convolution(f"{name}/pool_proj", pooled, width, 3, "kernel_size: 1", (1, 1)))
    for top in tops:
        net.add(f"{top}_relu", "ReLU", top, tops=top)
    return net.add(f"{name}/output", "Concat", " ".join(tops))


def _googlenet() -> Network:
    net = Network(_input(1, 3, 64, 64))
    net.convolution("conv1/7x7_s2", "data", 3, 6, "kernel_size: 7 stride: 2 pad: 3", (7, 7))
    _pool(net, "pool1/3x3_s2", "conv1/7x7_s2", "pool: MAX kernel_size: 3 stride: 2")
    net.add("pool1/norm1", "LRN", "pool1/3x3_s2", "lrn_param { local_size: 5 alpha: 0.0001 beta: 0.75 }")
    top = _inception(net, "inception_3a", "pool1/norm1", 6)
    top = _pool(net, "pool3/3x3_s2", top, "pool: MAX kernel_size: 3 stride: 2")
    top = _inception(net, "inception_4a", top, 12)
    top = _pool(net, "pool5", top, "pool: AVE kernel_size: 8 stride: 1")
    top = net.add("pool5/drop", "Dropout", top, "dropout_param { dropout_ratio: 0.4 }", top)
    net.dense("loss3/classifier", top, 12, 10)
    net.add("prob", "Softmax", "loss3/classifier")
    return net


def _resnet() -> Network:
    net = Network(_input(1, 3, 32, 32))
    top = net.normalised("conv1", "data", 3, 8, "kernel_size: 7 pad: 3 stride: 2", (7, 7))
    top = _pool(net, "pool1", top, "kernel_size: 3 stride: 2 pool: MAX")
    width = 8
    for number, count in enumerate((8, 12), 2):
        stride = number - 1
        short = net.normalised(f"res{number}_branch1", top, width, count, f"kernel_size: 1 stride: {stride}", (1, 1))
        long = net.normalised(f"res{number}_branch2a", top, width, 4, f"kernel_size: 1 stride: {stride}", (1, 1))
        long = net.normalised(f"res{number}_branch2b", long, 4, 4, "kernel_size: 3 pad: 1")
        long = net.normalised(f"res{number}_branch2c", long, 4, count, "kernel_size: 1", (1, 1))
        top = net.add(f"res{number}", "Eltwise", f"{short} {long}")
        net.add(f"res{number}_relu", "ReLU", top, tops=top)
        width = count
    _pool(net, "pool5", top, "global_pooling: true pool: AVE")
    net.dense("fc1000", "pool5", width, 10)
    net.add("prob", "Softmax", "fc1000")
    return net


def _mobilenet() -> Network:
    net = Network(_input(1, 3, 32, 32))
    top, width = net.normalised("conv1", "data", 3, 8, "kernel_size: 3 pad: 1 stride: 2"), 8
    for number, (count, stride) in enumerate(((12, 1), (16, 2), (16, 1)), 2):
        top = net.normalised(
            f"conv{number}/dw", top, width, width, f"kernel_size: 3 pad: 1 stride: {stride}", group=width
        )
        top, width = net.normalised(f"conv{number}/sep", top, width, count, "kernel_size: 1", (1, 1)), count
    _pool(net, "pool6", top, "pool: AVE global_pooling: true")
    net.convolution("fc7", "pool6", width, 10, "kernel_size: 1", (1, 1))
    net.add("flat", "Flatten", "fc7")
    net.add("prob", "Softmax", "flat")
    return net


def _ssd() -> Network:
    net = Network(_input(1, 3, 64, 64))
    net.convolution("conv4_3", "data", 3, 8, "kernel_size: 3 pad: 1 stride: 4")
    net.add("relu4_3", "ReLU", "conv4_3", tops="conv4_3")
    norm = "norm_param { across_spatial: false scale_filler { type: 'constant' value: 20 } channel_shared: false }"
    net.add("conv4_3_norm", "Normalize", "conv4_3", norm, blobs=[np.full(8, 5, np.float32)])
    _pool(net, "pool5", "conv4_3", "pool: MAX kernel_size: 3 stride: 2 pad: 1")
    net.convolution("fc6", "pool5", 8, 8, "pad: 6 kernel_size: 3 dilation: 6")
    net.add("relu6", "ReLU", "fc6", tops="fc6")
    places, scores, priors = [], [], []
    for source, least, most in (("conv4_3_norm", 8, 16), ("fc6", 16, 32)):
        for kind, count, into in (("loc", 4 * 4, places), ("conf", 4 * 3, scores)):
            top = net.convolution(f"{source}_mbox_{kind}", source, 8, count, "kernel_size: 3 pad: 1")
            top = net.add(f"{top}_perm", "Permute", top, "permute_param { order: 0 order: 2 order: 3 order: 1 }")
            into.append(net.add(f"{top}_flat", "Flatten", top, "flatten_param { axis: 1 }"))
        text = (
            f"min_size: {least} max_size: {most} aspect_ratio: 2 flip: true clip: true variance: [0.1, 0.1, 0.2, 0.2]"
        )
        priors.append(net.add(f"{source}_mbox_priorbox", "PriorBox", f"{source} data", f"prior_box_param {{ {text} }}"))
    net.add("mbox_loc", "Concat", " ".join(places), "concat_param { axis: 1 }")
    net.add("mbox_conf", "Concat", " ".join(scores), "concat_param { axis: 1 }")
    net.add("mbox_priorbox", "Concat", " ".join(priors), "concat_param { axis: 2 }")
    net.add("mbox_conf_reshape", "Reshape", "mbox_conf", "reshape_param { shape { dim: 0 dim: -1 dim: 3 } }")
    net.add("mbox_conf_softmax", "Softmax", "mbox_conf_reshape", "softmax_param { axis: 2 }")
    net.add("mbox_conf_flatten", "Flatten", "mbox_conf_softmax", "flatten_param { axis: 1 }")
    text = (
        "num_classes: 3 share_location: true background_label_id: 0 nms_param { nms_threshold: 0.45 top_k: 100 }"
        " code_type: CENTER_SIZE keep_top_k: 20 confidence_threshold: 0.4"
    )
    net.add(
        "detection_out",
        "DetectionOutput",
        "mbox_loc mbox_conf_flatten mbox_priorbox",
        f"detection_output_param {{ {text} }}",
    )
    return net


def _fcn() -> Network:
    net = Network(_input(1, 3, 32, 40))
    net.convolution("conv1", "data", 3, 4, "kernel_size: 3 pad: 10")
    net.add("relu1", "ReLU", "conv1", tops="conv1")
    _pool(net, "pool1", "conv1", "kernel_size: 2 stride: 2")
    _pool(net, "pool2", "pool1", "pool: AVE kernel_size: 3 stride: 2 pad: 1")
    net.convolution("score", "pool2", 4, 3, "kernel_size: 1", (1, 1))
    text = "convolution_param { num_output: 3 bias_term: false kernel_size: 8 stride: 4 group: 3 }"
    net.add("upscore", "Deconvolution", "score", text, blobs=[net.random(3, 1, 8, 8)])
    net.add("cropped", "Crop", "upscore data", "crop_param { axis: 2 offset: 9 }")
    return net


def _squeezenet() -> Network:
    net = Network(_input(1, 3, 47, 47))
    net.convolution("conv1", "data", 3, 6, "kernel_h: 3 kernel_w: 5 stride: 2 pad_h: 1 pad_w: 2", (3, 5))
    top = _pool(net, "pool1", "conv1", "pool: MAX kernel_size: 3 stride: 2")
    squeezed = net.convolution("squeeze", top, 6, 3, "kernel_size: 1", (1, 1))
    net.add("relu_squeeze", "ReLU", squeezed, "relu_param { negative_slope: 0.1 }", squeezed)
    one = net.convolution("expand1x1", squeezed, 3, 4, "kernel_size: 1", (1, 1))
    three = net.convolution("expand3x3", squeezed, 3, 4, "kernel_size: 3 pad: 1")
    net.add("concat", "Concat", f"{one} {three}", "concat_param { concat_dim: 1 }")
    _pool(net, "pool10", "concat", "pool: AVE global_pooling: true")
    net.add("prob", "Softmax", "pool10")
    return net


def _light_cnn() -> Network:
    """Max-feature-map activations: two halves of the channels, and the larger value of each."""
    net = Network(_input(1, 1, 24, 24))
    net.convolution("conv1", "data", 1, 8, "kernel_size: 5 pad: 2", (5, 5))
    net.add("slice1", "Slice", "conv1", "slice_param { axis: 1 }", "slice1_1 slice1_2")
    net.add("etlwise1", "Eltwise", "slice1_1 slice1_2", "eltwise_param { operation: MAX }")
    net.add("prelu", "PReLU", "etlwise1", blobs=[net.random(4)])
    net.add("split", "Slice", "prelu", "slice_param { axis: 1 slice_point: 1 slice_point: 3 }", "a b c")
    net.add("weighted", "Eltwise", "a c", "eltwise_param { operation: SUM coeff: 0.5 coeff: -2 }")
    net.add("product", "Eltwise", "a c weighted", "eltwise_param { operation: PROD }")
    net.add("joined", "Concat", "product b", "concat_param { axis: -3 }")
    net.dense("fc", "joined", 3 * 24 * 24, 6)
    return net


def _functions() -> Network:
    net = Network(_input(1, 6))
    net.add("elu", "ELU", "data", "elu_param { alpha: 0.7 }")
    net.add("sigmoid", "Sigmoid", "elu")
    net.add("tanh", "TanH", "data")
    net.add("bnll", "BNLL", "data")
    net.add("power", "Power", "bnll", "power_param { power: 1.5 scale: 2 shift: 0.1 }")
    net.add("log", "Log", "power", "log_param { base: 2 scale: 1 shift: 1 }")
    net.add("exp", "Exp", "tanh", "exp_param { base: 3 scale: 0.5 shift: 0.2 }")
    net.add("abs", "AbsVal", "tanh")
    net.add("swish", "Swish", "data", "swish_param { beta: 1.5 }")
    net.add("clip", "Clip", "data", "clip_param { min: -0.5 max: 0.5 }")
    net.add("step", "Threshold", "tanh", "threshold_param { threshold: 0.1 }")
    net.add("six", "ReLU6", "data")
    net.add("bias", "Bias", "six", blobs=[net.random(6)])
    net.add("all", "Concat", "sigmoid log exp abs swish clip step bias")
    return net


def _shapes() -> Network:
    net = Network(_input(2, 4, 6, 5))
    net.add("mvn", "MVN", "data", "mvn_param { across_channels: false }")
    net.add("lrn", "LRN", "mvn", "lrn_param { norm_region: WITHIN_CHANNEL local_size: 3 alpha: 0.5 beta: 0.75 }")
    net.add("permuted", "Permute", "lrn", "permute_param { order: 0 order: 2 }")
    net.add("tiled", "Tile", "permuted", "tile_param { axis: 2 tiles: 3 }")
    net.add("reshaped", "Reshape", "tiled", "reshape_param { shape { dim: 0 dim: -1 } axis: 1 num_axes: 2 }")
    net.add("reduced", "Reduction", "reshaped", "reduction_param { operation: ASUM axis: 2 coeff: 0.5 }")
    net.add("best", "ArgMax", "data", "argmax_param { axis: 1 }")
    net.add("best_of_all", "ArgMax", "data", "argmax_param { out_max_val: true }")
    net.add("gate", "Pooling", "data", "pooling_param { pool: AVE global_pooling: true }")
    net.add("flat_gate", "Flatten", "gate")
    net.add("gated", "Scale", "data flat_gate", "scale_param { axis: 0 }")
    net.dense("per_row", "gated", 5, 3)
    net.text = net.text.replace("num_output: 3 }", "num_output: 3 axis: -1 }")
    return net


def _embedding() -> Network:
    net = Network(_input(4, 7, name="ids"))
    text = "embed_param { input_dim: 20 num_output: 6 }"
    net.add("embed", "Embed", "ids", text, blobs=[net.random(20, 6), net.random(6)])
    net.dense("score", "embed", 42, 3)
    return net


def _volume() -> Network:
    net = Network(_input(1, 2, 6, 8, 8))
    net.convolution("conv3d", "data", 2, 4, "kernel_size: 3 pad: 1 stride: 1", (3, 3, 3))
    net.add("relu", "ReLU", "conv3d", tops="conv3d")
    net.dense("fc", "conv3d", 4 * 6 * 64, 5)
    return net


def _in_place_on_input() -> Network:
    net = Network(_input(1, 3, 8, 8))
    net.add("shift", "Power", "data", "power_param { scale: 0.0078125 shift: -1 }", "data")
    net.convolution("conv", "data", 3, 4, "kernel_size: 3")
    net.add("relu", "ReLU", "conv", tops="conv")
    net.add("half", "Power", "conv", "power_param { scale: 0.5 }", "conv")
    return net


def _trained() -> Network:
    """As for training: data and loss layers, both phases."""
    net = Network(
        'layer { name: "mnist" type: "Data" top: "data" top: "label" include { phase: TRAIN } data_param { batch_size: 64 } }\n'
        'layer { name: "mnist" type: "Data" top: "data" top: "label" include { phase: TEST } data_param { batch_size: 100 } }\n'
    )
    net.convolution("conv1", "data", 1, 4, "kernel_size: 5 stride: 2", (5, 5))
    net.add("drop", "Dropout", "conv1", "include { phase: TRAIN }", "conv1")
    net.dense("ip", "conv1", 4 * 12 * 12, 10)
    net.add("accuracy", "Accuracy", "ip label", "include { phase: TEST }")
    net.add("loss", "SoftmaxWithLoss", "ip label")
    return net


def _write(make: Callable[[], Network], folder: Path) -> Path:
    return make().write(folder, make.__name__.strip("_"))


def _old_lenet(folder: Path) -> Path:
    """LeNet in the form V1, with weights of four dimensions."""
    net = _lenet()
    text = 'input: "data" input_dim: 1 input_dim: 1 input_dim: 28 input_dim: 28\n' + net.text.partition("\n")[2]
    for new, old in (
        ("InnerProduct", "INNER_PRODUCT"),
        *((kind, kind.upper()) for kind in ("Convolution", "Pooling", "ReLU", "Softmax")),
    ):
        text = text.replace(f'type: "{new}"', f"type: {old}")
    (folder / "old.prototxt").write_text(text.replace("layer {", "layers {"))
    (folder / "old.caffemodel").write_bytes(caffemodel(net.weights, is_old=True))
    return folder / "old.prototxt"


def _recurrent(folder: Path) -> Path:
    net = Network(_input(1, 3, 4))
    net.add("lstm", "LSTM", "data", "recurrent_param { num_output: 4 }", blobs=[net.random(16, 4)])
    net.add("pool", "Pooling", "lstm", "pooling_param { pool: STOCHASTIC kernel_size: 2 }")
    return net.write(folder, "recurrent")


_MNIST = ConvertOptions(inputs=(InputSpec("data", DataType.FP32, ("N", 1, 28, 28)),))
_IMAGES = ConvertOptions(dynamic={"data": {0: "batch", 2: "height", 3: "width"}})
_NETWORKS: tuple[Callable[[], Network], ...] = (
    _lenet,
    _alexnet,
    _googlenet,
    _resnet,
    _mobilenet,
    _ssd,
    _squeezenet,
    _light_cnn,
    _functions,
    _shapes,
    _embedding,
    _volume,
    _in_place_on_input,
)
MODELS: dict[str, ZooModel] = {
    **{make.__name__.strip("_"): ZooModel("caffe", partial(_write, make)) for make in _NETWORKS},
    "fcn": ZooModel("caffe", partial(_write, _fcn), _IMAGES),
    "trained": ZooModel("caffe", partial(_write, _trained), _MNIST),
    "old_lenet": ZooModel("caffe", _old_lenet),
    "recurrent": ZooModel("caffe", _recurrent, diagnosis="LSTM"),
}
