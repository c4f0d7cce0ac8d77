"""Tiny models of every family that people train, built from configs alone, with batches that a seed decides."""

import torch
import transformers as tf


VOCAB = 64
ROWS, LENGTH = 2, 8

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
_ENCODER_DECODER = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_BART = {**_ENCODER_DECODER, "max_position_embeddings": 32, "forced_eos_token_id": 2}
_WHISPER = {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {**_ENCODER, **_NO_DROPOUT, "vocab_size": VOCAB, "max_position_embeddings": 32, "num_labels": 3}
_VISION = {**_ENCODER, "image_size": 16, "patch_size": 8}
IMAGE_TOKEN = VOCAB - 1


def _llava_config():
    """Reads the last vision layer but one, so the last one is never used."""
    return tf.LlavaConfig(
        vision_config=tf.CLIPVisionConfig(**_VISION, projection_dim=32),
        text_config=tf.LlamaConfig(**_DECODER),
        image_token_id=IMAGE_TOKEN,
        vision_feature_layer=-2,
    )


# Model classes stand here and not in functions, so that importing this file imports them once for all ranks.
_MODELS = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, _DECODER),
    "llama_tied": (tf.LlamaForCausalLM, tf.LlamaConfig, {**_DECODER, "tie_word_embeddings": True}),
    "qwen2": (tf.Qwen2ForCausalLM, tf.Qwen2Config, _DECODER),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "gemma": (tf.GemmaForCausalLM, tf.GemmaConfig, {**_DECODER, "head_dim": 8}),
    "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, _GPT2),
    "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, {**_DECODER, **_ROUTED, "num_local_experts": 8}),
    "qwen3_moe": (
        tf.Qwen3MoeForCausalLM,
        tf.Qwen3MoeConfig,
        {
            **_DECODER,
            **_ROUTED,
            "head_dim": 8,
            "num_experts": 16,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
    ),
    "t5": (tf.T5ForConditionalGeneration, tf.T5Config, _T5),
    "bart": (tf.BartForConditionalGeneration, tf.BartConfig, _BART),
    "bert": (tf.BertForSequenceClassification, tf.BertConfig, _BERT),
    "vit": (tf.ViTForImageClassification, tf.ViTConfig, {**_VISION, **_NO_DROPOUT, "num_labels": 3}),
    "whisper": (tf.WhisperForConditionalGeneration, tf.WhisperConfig, _WHISPER),
    "llava": (tf.LlavaForConditionalGeneration, _llava_config, {}),
}
NAMES = tuple(_MODELS)
WITH_UNUSED_PARAMETERS = {"llava"}


def build(name, seed=0):
    """The model of this name with weights that the seed decides, in training mode; the global seed is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class, config, settings = _MODELS[name]
        return model_class(config(**settings)).train()


def batch(name, rank, step):
    """One micro-batch with labels, different for every rank and step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(3, IMAGE_TOKEN, (ROWS, LENGTH), generator=draw)
    if name == "bert":
        return {"input_ids": ids, "labels": torch.randint(3, (ROWS,), generator=draw)}
    if name == "vit":
        pixels = torch.randn(ROWS, 3, _VISION["image_size"], _VISION["image_size"], generator=draw)
        return {"pixel_values": pixels, "labels": torch.randint(3, (ROWS,), generator=draw)}
    if name == "whisper":
        return {"input_features": torch.randn(ROWS, 8, 32, generator=draw), "labels": ids}
    if name in ("t5", "bart"):
        return {"input_ids": ids, "labels": torch.randint(3, VOCAB, (ROWS, LENGTH - 2), generator=draw)}
    if name == "llava":
        pixels = torch.randn(ROWS, 3, _VISION["image_size"], _VISION["image_size"], generator=draw)
        patches = (_VISION["image_size"] // _VISION["patch_size"]) ** 2
        ids[:, 1 : 1 + patches] = IMAGE_TOKEN
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        return {"input_ids": ids, "pixel_values": pixels, "labels": labels}
    return {"input_ids": ids, "labels": ids.clone()}
