"""Models of PaddlePaddle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.zoo.model import ZooModel


def _saved(network: Callable[[], object], shape: list[int | None], dtype: str = "float32") -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        import paddle

        paddle.disable_static()
        paddle.seed(1)
        module = network()
        module.eval()  # type: ignore[attr-defined]
        spec = paddle.static.InputSpec(shape, dtype, "x")
        paddle.jit.save(module, str(folder / "model"), input_spec=[spec])
        return folder

    return make


def _mlp() -> object:
    from paddle import nn

    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3), nn.Softmax())


def _cnn() -> object:
    from paddle import nn

    body = [nn.Conv2D(1, 4, 3, padding=1), nn.BatchNorm2D(4), nn.Hardswish(), nn.MaxPool2D(2, ceil_mode=True)]
    head = [nn.Conv2D(4, 4, 3, groups=4, padding=1), nn.AdaptiveAvgPool2D(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*body, *head)


def _ocr() -> object:
    """The structure of a text recogniser: convolutions, columns as a sequence, a recurrent layer, scores of each column."""
    from paddle import nn

    class Recogniser(nn.Layer):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Conv2D(1, 4, 3, stride=(2, 1), padding=1), nn.ReLU(), nn.MaxPool2D((4, 1)))
            self.sequence = nn.LSTM(4, 5, direction="bidirect")
            self.head = nn.Linear(10, 7)

        def forward(self, x: object) -> object:
            columns = self.body(x).squeeze(2).transpose([0, 2, 1])
            return nn.functional.softmax(self.head(self.sequence(columns)[0]), axis=2)

    return Recogniser()


def _encoder() -> object:
    from paddle import nn

    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), 1)


def _words() -> object:
    from paddle import nn

    return nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 4), nn.Tanh())


def _upsampler() -> object:
    from paddle import nn

    return nn.Sequential(
        nn.Conv2DTranspose(2, 3, 2, stride=2), nn.PReLU(3), nn.Upsample(size=[16, 16], mode="bilinear")
    )


def _scaled() -> object:
    """Upsampling by a factor, at which paddle2onnx 2.1 ends its process."""
    from paddle import nn

    return nn.Sequential(nn.PReLU(2), nn.Upsample(scale_factor=2, mode="bilinear"))


def _gamma() -> object:
    import paddle

    class Gamma(paddle.nn.Layer):  # type: ignore[misc, name-defined]
        def forward(self, x: object) -> object:
            return paddle.lgamma(x) + paddle.digamma(x)

    return paddle.nn.Sequential(paddle.nn.PReLU(2), Gamma())


MODELS = {
    "mlp": ZooModel("paddle", _saved(_mlp, [None, 6])),
    "cnn": ZooModel("paddle", _saved(_cnn, [None, 1, 9, 9])),
    "ocr": ZooModel("paddle", _saved(_ocr, [None, 1, 8, 12])),
    "encoder": ZooModel("paddle", _saved(_encoder, [None, 5, 8])),
    "words": ZooModel("paddle", _saved(_words, [None, 4], "int64")),
    "upsampler": ZooModel("paddle", _saved(_upsampler, [None, 2, 4, 4])),
    "scaled": ZooModel("paddle", _saved(_scaled, [None, 2, 4, 4]), diagnosis="paddle2onnx cannot convert the model"),
    "gamma": ZooModel("paddle", _saved(_gamma, [None, 2, 4, 4]), diagnosis="lgamma at /Gamma/; digamma at /Gamma/"),
}
