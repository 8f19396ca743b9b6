"""Steps on text and sound, and the frames of a video, against their reference libraries: ``python -m benchmarks.steps_media``.

Measured as in ``benchmarks.steps``.
"""

from __future__ import annotations

import io
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import av
import cv2
import librosa
import numpy as np
import soundfile
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor

from benchmarks.steps import Case, photo, report
from penstock.pipeline.steps.audio.decode import DecodeAudio
from penstock.pipeline.steps.audio.frames import Frames
from penstock.pipeline.steps.audio.log_mel import LogMel, WhisperLogMel
from penstock.pipeline.steps.audio.resample import Resample
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.steps.text.normalise import NormaliseText
from penstock.pipeline.steps.text.tokenise import Tokenise
from penstock.pipeline.video import read_frames

_RATE = 16_000
_SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def texts() -> list[Case]:
    """A sentence, a page, and 32 sentences at once, with a WordPiece tokenizer."""
    sentence = "The pump moved forty litres of water through the pipe, and nobody noticed the leak. "
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator([sentence], trainers.WordPieceTrainer(special_tokens=_SPECIALS, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    step = Tokenise(padding="fixed").bound(StepResources(files={"tokenizer.json": tokenizer.to_str().encode()}))

    def reference(texts: list[str]) -> Any:
        return fast(texts, max_length=512, truncation=True, padding="max_length", return_tensors="np")

    page, many = sentence * 20, [{"text": f"{number} {sentence}"} for number in range(32)]
    normaliser, normalise = normalizers.NFC(), NormaliseText()
    accented = unicodedata.normalize("NFD", "Où êtes-vous ? À l’étage, près de la fenêtre. " * 40)
    return [
        Case(
            "tokenise a sentence", "transformers", lambda: step.run({"text": sentence}), lambda: reference([sentence])
        ),
        Case("tokenise a page", "transformers", lambda: step.run({"text": page}), lambda: reference([page])),
        Case(
            "tokenise 32 sentences",
            "transformers",
            lambda: step.run_many(many),
            lambda: reference([item["text"] for item in many]),
        ),
        Case(
            "normalise_text",
            "tokenizers",
            lambda: normalise.run({"value": accented}),
            lambda: normaliser.normalize_str(accented),
        ),
    ]


def sounds() -> list[Case]:
    """Ten seconds of sound."""
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 10 * 44_100).astype(np.float32)
    samples = noise[: 10 * _RATE]
    cases = []
    for form in ("WAV", "FLAC", "OGG", "MP3"):
        file = io.BytesIO()
        soundfile.write(file, np.stack([noise, noise], axis=1), 44_100, format=form)
        content = file.getvalue()

        def load(content: bytes = content) -> object:
            return librosa.load(io.BytesIO(content), sr=_RATE)

        def decode(content: bytes = content) -> object:
            return DecodeAudio(rate=_RATE).run({"file": content})

        cases.append(Case(f"decode_audio {form}", "librosa", decode, load))
    resample, mel, frames, whisper = (
        Resample(source_rate=44_100, rate=_RATE),
        LogMel(rate=_RATE),
        Frames(length=400, hop=160),
        WhisperLogMel(),
    )
    small = LogMel(rate=_RATE, n_fft=400, hop=160, n_mels=80)
    extract = WhisperFeatureExtractor()

    def reference(step: LogMel) -> object:
        power = librosa.feature.melspectrogram(
            y=samples, sr=_RATE, n_fft=step.n_fft, hop_length=step.hop, n_mels=step.n_mels
        )
        return librosa.power_to_db(power)

    return [
        *cases,
        Case(
            "resample 44.1 to 16 kHz",
            "librosa",
            lambda: resample.run({"value": noise}),
            lambda: librosa.resample(noise, orig_sr=44_100, target_sr=_RATE),
        ),
        Case(
            "frames",
            "librosa",
            lambda: frames.run({"value": samples}),
            lambda: list(librosa.util.frame(samples, frame_length=400, hop_length=160, axis=0)),
        ),
        Case("log_mel", "librosa", lambda: mel.run({"value": samples}), lambda: reference(mel)),
        Case(
            "log_mel, 400 samples, 80 bands", "librosa", lambda: small.run({"value": samples}), lambda: reference(small)
        ),
        Case(
            "whisper_log_mel",
            "transformers",
            lambda: whisper.run({"value": samples}),
            lambda: extract(samples, sampling_rate=_RATE, return_tensors="np"),
        ),
    ]


def videos(folder: Path) -> list[Case]:
    """All frames of two seconds of H.264, 640 × 360."""
    path, pixels = folder / "clip.mp4", photo(360, 640)
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for index in range(60):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(pixels, 3 * index, axis=1), format="rgb24")))
        container.mux(stream.encode())

    def ours() -> object:
        return sum(frame.pixels.shape[0] for frame in read_frames(path))

    def opencv() -> object:
        capture = cv2.VideoCapture(str(path))
        count = 0
        while True:
            is_read, frame = capture.read()
            if not is_read:
                return count
            count += cv2.cvtColor(frame, cv2.COLOR_BGR2RGB).shape[0]

    return [Case("read_frames H.264", "OpenCV", ours, opencv)]


def cases(folder: Path) -> list[Case]:
    """All cases. Files are written to ``folder``."""
    return [*texts(), *sounds(), *videos(folder)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        report(cases(Path(place)))
