"""Small random models of ``transformers``, written as folders with ``save_pretrained``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec

_TEXT = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
}
_DISTIL = {"vocab_size": 50, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40}
_GPT2 = {
    "vocab_size": 50,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": 50,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_CLIP = {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 8}
_WAV2VEC2 = {
    **{key: value for key, value in _TEXT.items() if key != "max_position_embeddings"},
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(chr, range(ord("a"), ord("z") + 1))]


def write(
    folder: Path, architecture: str, config: Mapping[str, Any], more: Callable[[Path], None] | None = None
) -> Path:
    """Write the folder of a random model; ``more`` adds files."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    cls = getattr(transformers, architecture)
    model = cls(cls.config_class(**config)).eval()
    path = folder / architecture
    model.save_pretrained(path)
    if more is not None:
        more(path)
    return path


def _tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(_WORDS) + "\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')


def _images(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor", "size": 16}')


def _model(
    architecture: str, config: Mapping[str, Any], *inputs: str, more: Callable[[Path], None] | None = None
) -> ZooModel:
    declared = tuple(InputSpec(name, None, None) for name in inputs)
    make = partial(write, architecture=architecture, config=config, more=more)
    return ZooModel("huggingface", make, ConvertOptions(inputs=declared))


MODELS = {
    "bert": _model("BertForSequenceClassification", _TEXT, more=_tokenizer),
    "distilbert": _model("DistilBertForTokenClassification", _DISTIL),
    "roberta": _model("RobertaForQuestionAnswering", _TEXT),
    "vit": _model("ViTForImageClassification", _VISION, more=_images),
    "resnet": _model(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    ),
    "clip": _model("CLIPModel", _CLIP),
    "wav2vec2": _model("Wav2Vec2ForCTC", _WAV2VEC2),
    "whisper": _model("WhisperForConditionalGeneration", _WHISPER),
    "whisper_encoder": _model("WhisperForConditionalGeneration", _WHISPER, "input_features"),
    "whisper_decoder": _model(
        "WhisperForConditionalGeneration", _WHISPER, "decoder_input_ids", "encoder_hidden_states"
    ),
    "t5": _model("T5ForConditionalGeneration", _T5),
    "gpt2": _model("GPT2LMHeadModel", _GPT2),
    "gpt2_step": _model("GPT2LMHeadModel", _GPT2, "past_key_values"),
    "llama_step": _model("LlamaForCausalLM", {**_TEXT, "num_key_value_heads": 1}, "past_key_values"),
}
