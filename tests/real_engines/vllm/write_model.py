"""Writes a tiny Llama with random weights and a tokenizer of its own: ``python write_model.py FOLDER``.

Runs with the engines' own Python. What it generates means nothing, but it is plain: greedy sampling yields only whole words
with a space before them, one token each, so that an answer that comes back in the next prompt is cut into the very tokens
that were generated. Attention is real: every word depends on the whole prefix.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import WORDS

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD = 2, 64, 4, 2, 32
LONGEST = 32_768
END, PAD, SPECIAL = "<|im_end|>", "<|endoftext|>", ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tools>", "</tools>")
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- 'use these tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\ntool result\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""".strip()


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE that knows every word of `WORDS`, with and without a space before it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([f"{word}\n {word}" for word in WORDS for _ in range(2)], trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    # As in Qwen's: text is split at them before anything else.
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def weights(vocabulary: int, spoken: list[int]) -> dict[str, np.ndarray]:
    """Random tensors; only the tokens ``spoken`` ever have a logit other than 0."""
    random = np.random.default_rng(1)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    inner, scale = 2 * HIDDEN, 2 / HIDDEN**0.5
    head = np.zeros((vocabulary, HIDDEN), dtype=np.float32)
    head[spoken] = normal(len(spoken), HIDDEN, scale=0.5)
    tensors = {
        "model.embed_tokens.weight": normal(vocabulary, HIDDEN, scale=1.0),
        "lm_head.weight": head,
        "model.norm.weight": ones,
    }
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (inner, HIDDEN),
        "mlp.up_proj": (inner, HIDDEN),
        "mlp.down_proj": (HIDDEN, inner),
    }
    for layer in range(LAYERS):
        start = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}.{name}.weight"] = ones.copy()
        for name, shape in shapes.items():
            tensors[f"{start}.{name}.weight"] = normal(*shape, scale=scale)
    return tensors


def main(folder: Path) -> None:
    """Write everything that an engine loads."""
    tokenizer = make_tokenizer()
    cut = [tokenizer.encode(f" {word}").ids for word in WORDS]
    assert all(len(ids) == 1 for ids in cut), "every word must be one token"
    vocabulary = (tokenizer.get_vocab_size() + 63) // 64 * 64
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": LONGEST,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": pad,
        "dtype": "float32",
    }
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": end, "pad_token_id": pad, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "model_max_length": LONGEST,
            "clean_up_tokenization_spaces": False,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    save_file(weights(vocabulary, [ids[0] for ids in cut]), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
