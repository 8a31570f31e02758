"""A tiny Llama with random weights and a vocabulary of its own, as a GGUF file.

The text it generates means nothing. What matters is real: a byte-level BPE tokenizer, ChatML, attention over the whole
prefix, a KV cache.
"""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

LAYERS = 2
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
CONTEXT = 32_768
WORDS = "the of and to in is that for file tool test call user error result agent path line read code next step".split()
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters() -> list[str]:
    """One printable letter for each byte value, as byte-level BPE spells them."""
    letters, spare = [], 256
    for value in range(256):
        if 33 <= value <= 126 or 161 <= value <= 172 or 174 <= value <= 255:
            letters.append(chr(value))
        else:
            letters.append(chr(spare))
            spare += 1
    return letters


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens, the special ones last, and merges in their order: each word of `WORDS`, with a space before it, is one token."""
    letters = byte_letters()
    tokens, merges = list(letters), []
    for word in WORDS:
        pieces = [letters[value] for value in f" {word}".encode()]
        grown = pieces[0]
        for piece in pieces[1:]:
            if grown + piece not in tokens:
                merges.append(f"{grown} {piece}")
                tokens.append(grown + piece)
            grown += piece
    return [*tokens, *SPECIAL], merges


def write_model(path: Path, seed: int = 1) -> None:
    """Write the model to ``path``: about half a megabyte, the same bytes for the same ``seed``."""
    random = np.random.default_rng(seed)
    tokens, merges = vocabulary()
    size = len(tokens)
    kinds = [TokenType.NORMAL] * (size - len(SPECIAL)) + [TokenType.CONTROL] * len(SPECIAL)
    head = HIDDEN // HEADS
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(size)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(size - 2)
    writer.add_pad_token_id(size - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    def tensor(name: str, rows: int, columns: int, scale: float) -> None:
        writer.add_tensor(name, (random.standard_normal((rows, columns)) * scale).astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, dtype=np.float32))

    tensor("token_embd.weight", size, HIDDEN, 1.0)
    tensor("output.weight", size, HIDDEN, 0.3)
    ones("output_norm.weight")
    for layer in range(LAYERS):
        block, scale = f"blk.{layer}", 2 / HIDDEN**0.5
        ones(f"{block}.attn_norm.weight")
        ones(f"{block}.ffn_norm.weight")
        tensor(f"{block}.attn_q.weight", HIDDEN, HIDDEN, scale)
        tensor(f"{block}.attn_k.weight", KV_HEADS * head, HIDDEN, scale)
        tensor(f"{block}.attn_v.weight", KV_HEADS * head, HIDDEN, scale)
        tensor(f"{block}.attn_output.weight", HIDDEN, HIDDEN, scale)
        tensor(f"{block}.ffn_gate.weight", 2 * HIDDEN, HIDDEN, scale)
        tensor(f"{block}.ffn_up.weight", 2 * HIDDEN, HIDDEN, scale)
        tensor(f"{block}.ffn_down.weight", HIDDEN, 2 * HIDDEN, scale)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
