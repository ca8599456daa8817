"""Mutations of model files: whatever a file of a model may say that no program wrote.

Everything follows from a seed. Structure first: a field of a header, of a JSON file or of a
tensor's place gets another value, of its own kind or of another one. Now and then it is bytes that
are changed.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

from support.gguf_parts import ARRAY, NUMBERS, STRING, Entry, Key, Parts, Raw

Random = random.Random

WHOLE = (
    *(0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 127, 255, 256, 1023, 4096, 65535, 1 << 16, 1 << 20),
    *((1 << 20) + 1, 1 << 22, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1),
)
REAL = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, 3e38, float("inf"), -float("inf"), float("nan"))
TEXTS = (
    *("", "\0", "a" * 1000, "N" * 100_000, "../../etc/passwd", "\x1b[2J\x1b]0;x\x07", "%s%n", "\n"),
    *("\u202e", "\ud7ff", "llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"),
    *("granite", "smollm3", "gpt2", "bert", "yarn", "linear", "longrope", "default", "llama-bpe"),
    *("tekken", "[PAD1]", "<s>", "</s>", " ", "a b c", "l", "e", "{{ 1/0 }}", "{{ messages }}"),
    *("gptq", "awq", "silu", "relu", "float32", "int32", "F64", "BF16", "I8", "full_attention"),
)
JSON: tuple[Any, ...] = (
    *(None, True, False, [], {}, [1], [None], ["a"], {"a": 1}, {"rope_type": "yarn", "factor": 0}),
    *({"rope_type": "x"}, -1, -(1 << 63), 10**30, 1 << 64, [[]], [1, 2, 3], 1e308, *REAL),
)
FIELDS = (
    *("quantization_config", "rope_scaling", "rope_parameters", "layer_types", "head_dim"),
    *("num_hidden_layers", "vocab_size", "auto_map", "torch_dtype", "sliding_window", "eos_token"),
    *("tie_word_embeddings", "model_type", "architectures", "num_local_experts", "text_config"),
    *("eos_token_id", "bos_token_id", "target_layer_ids", "block_size", "draft_vocab_size"),
    *("hidden_size", "num_key_value_heads", "partial_rotary_factor", "num_target_layers"),
    *("transformer_layer_config", "dflash_config", "eagle_config", "num_special_tokens"),
    *("use_sliding_window", "max_position_embeddings", "added_tokens", "chat_template"),
    *("tokenizer_class", "model_max_length", "bits", "group_size", "config_groups", "ignore"),
)
BOMBS = (
    *(
        "[" * 100_000,
        '{"a":' * 100_000,
        "",
        "null",
        "[]",
        '"x"',
        "\0",
        "1" * 5000,
        "[" + "1," * 999,
    ),
    *('{"model_type":"llama"}', '{"__float__":"x"}', '{"a":1,"a":2}', "NaN", "\ufeff{}"),
)
KEYS = (
    *("general.alignment", "split.count", "split.no", "llama.expert_count", "llama.vocab_size"),
    *("llama.rope.scaling.type", "llama.attention.key_length", "llama.rope.dimension_count"),
    *("llama.attention.sliding_window", "qwen3.attention.key_length", "general.architecture"),
    *("tokenizer.ggml.add_eos_token", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.pre"),
    *("tokenizer.chat_template", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"),
)
TENSORS = (
    *(b"rope_freqs.weight", b"rope_factors_long.weight", b"output.weight", b"blk..", b""),
    *(b"blk.99999999999999999999.x", b"blk.\xff.x", b"blk.1.attn_q.bias", b"blk.0.ffn_up.bias"),
)


def mutated(seed: Path, target: Path, chance: Random) -> str:
    """Write a mutation of a file or folder to `target`; returns what was done."""
    if seed.is_file():
        content, what = _gguf(seed.read_bytes(), chance)
        target.write_bytes(content)
        return what
    target.mkdir()
    files = sorted(file for file in seed.iterdir() if file.is_file())
    for file in files:
        # Not copied: a mutation that writes replaces the file.
        (target / file.name).symlink_to(file)
    told = [file for file in files if file.name.endswith("config.json")]
    chosen = chance.choice(told if told and chance.random() < 0.4 else files)
    content, what = _content(chosen, chance)
    (target / chosen.name).unlink()
    (target / chosen.name).write_bytes(content)
    if chance.random() < 0.05 and chosen.name != "model.safetensors":
        what += _sharded(target, chance)
    return f"{chosen.name}: {what}"


def _content(file: Path, chance: Random) -> tuple[bytes, str]:
    content = file.read_bytes()
    how = chance.random()
    if how < 0.05:
        return content[: chance.randrange(len(content) + 1)], "cut"
    if how < 0.12:
        return _noise(content, chance, len(content)), "noise"
    if file.suffix == ".json":
        if how < 0.2:
            return chance.choice(BOMBS).encode(), "bomb"
        return _json(content, chance, FIELDS).encode("utf-8", "surrogatepass"), "fields"
    if file.suffix == ".safetensors":
        return _safetensors(content, chance)
    if file.suffix == ".jinja":
        return chance.choice(TEXTS).encode("utf-8", "surrogatepass"), "template"
    return _noise(content, chance, len(content)), "noise"


def _noise(content: bytes, chance: Random, end: int) -> bytes:
    made = bytearray(content)
    for _ in range(chance.choice((1, 2, 4, 1000))):
        place = chance.randrange(max(1, min(end, len(made) - 8)))
        if chance.random() < 0.5:
            made[place] = chance.choice((0, 0x7C, 0x7E, 0xFF, chance.randrange(256)))
        else:
            struct.pack_into("<Q", made, place, chance.choice(WHOLE))
    return bytes(made[: len(content)])


# --- JSON ---------------------------------------------------------------------------------------


def _paths(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there is a value; of long lists some."""
    inner: Any = ()
    if isinstance(node, dict):
        inner = list(node.items())[:200]
    elif isinstance(node, list):
        inner = list(enumerate(node))[:20]
    found = [path] if path else []
    for key, value in inner:
        found += _paths(value, (*path, key))
    return found


def _json(content: bytes, chance: Random, fields: tuple[str, ...]) -> str:
    whole = json.loads(content)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        paths = _paths(whole)
        value = copy.deepcopy(chance.choice(chance.choice((WHOLE, JSON, TEXTS))))
        if not paths or chance.random() < 0.2:
            if isinstance(whole, dict):
                whole[chance.choice(fields)] = value
            continue
        *outer, last = chance.choice(paths)
        node = whole
        for key in outer:
            node = node[key]
        how = chance.random()
        if how < 0.15:
            del node[last]
        elif how < 0.25 and isinstance(node, dict):
            node[chance.choice(TEXTS)] = node.pop(last)
        elif how < 0.3 and isinstance(node[last], list):
            node[last] = node[last][:1] * chance.choice((0, 2, 1000))
        else:
            node[last] = value
    return json.dumps(whole, ensure_ascii=chance.random() < 0.5)


def _safetensors(content: bytes, chance: Random) -> tuple[bytes, str]:
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    how = chance.random()
    if how < 0.6:
        names = ("__metadata__", "x", "lm_head.weight", "model.norm.weight", "model.layers.0.x")
        made, what = _json(header, chance, names).encode("utf-8", "surrogatepass"), "header"
    elif how < 0.7:
        made, what = b"[" * length, "deep header"
    elif how < 0.85:
        whole = json.loads(header)
        name = chance.choice([name for name in whole if name != "__metadata__"])
        first, end = chance.choice((*WHOLE, -1, len(data))), chance.choice((*WHOLE, -1, len(data)))
        size, kind = chance.choice(WHOLE), chance.choice(("F32", "U8", "F64", "I4", "BOOL"))
        entry = {"dtype": kind, "shape": [size], "data_offsets": [first, end]}
        whole[chance.choice((name, "x"))] = entry
        made, what = json.dumps(whole).encode(), "place"
    else:
        return _noise(content, chance, 8 + length), "header noise"
    told = chance.choice(WHOLE) if chance.random() < 0.1 else len(made)
    return told.to_bytes(8, "little") + made + data, what


def _sharded(folder: Path, chance: Random) -> str:
    """An index that names strange files, in place of the one file."""
    if not (folder / "model.safetensors").exists():
        return ""
    (folder / "model.safetensors").rename(folder / "m1.safetensors")
    names = ("..", ".", "/etc/passwd", "../x", "a\0b", "model.safetensors", "x" * 5000, "", 1)
    listed = {"model.norm.weight": chance.choice(names), "x": "m1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return ", index"


# --- GGUF ---------------------------------------------------------------------------------------


def _number(kind: int, chance: Random) -> Any:
    code = NUMBERS[kind]
    if code[1] in "fd":
        return chance.choice(REAL)
    bits = 8 * struct.calcsize(code)
    value = (chance.choice(WHOLE) + chance.choice((-1, 0, 0, 1))) % (1 << bits)
    return value - (1 << bits) if code[1].islower() and value >> (bits - 1) else value


def _value(kind: int, chance: Random) -> Any:
    if kind == STRING:
        return chance.choice((*(text.encode() for text in TEXTS), b"\xff\xfe", b"a\xc3"))
    return _number(kind, chance)


def _key(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    if key.kind != ARRAY or isinstance(key.value, Raw):
        key.value = _value(key.kind, chance) if key.kind != ARRAY else Raw()
        return
    inner, values = key.value
    how = chance.randrange(7)
    if how == 0 and values:
        values[chance.randrange(len(values))] = _value(inner, chance)
    elif how == 1:
        del values[chance.randrange(len(values) + 1) :]
    elif how == 2:
        values += values[:50]
    elif how == 3:
        chance.shuffle(values)
    elif how == 4 and values:
        values[:] = [chance.choice(values)] * len(values)
    elif how == 5 and values and inner == STRING:
        values[chance.randrange(len(values))] = b"ab" * 50_000
    else:
        inner = chance.choice((*NUMBERS, STRING))
        values = [_value(inner, chance) for _ in values]
    key.value = (inner, values)


def _kind_of_key(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    key.kind = chance.choice((*NUMBERS, STRING))
    key.value = _value(key.kind, chance)


def _no_key(parts: Parts, chance: Random) -> None:
    parts.keys.remove(chance.choice(parts.keys))


def _key_twice(parts: Parts, chance: Random) -> None:
    parts.keys.append(chance.choice(parts.keys))


def _new_key(parts: Parts, chance: Random) -> None:
    kind = chance.choice((*NUMBERS, STRING))
    parts.set(chance.choice(KEYS).encode(), kind, _value(kind, chance))


def _raw_array(parts: Parts, chance: Random) -> None:
    key = chance.choice(parts.keys)
    told = struct.pack("<IQ", chance.choice((*NUMBERS, 8, 9, 13, 255)), chance.choice(WHOLE))
    key.kind, key.value = ARRAY, Raw(told + b"\1" * chance.choice((0, 8, 100)))


def _sizes(parts: Parts, chance: Random) -> None:
    tensor = chance.choice(parts.tensors)
    how = chance.randrange(3)
    if how == 0:
        tensor.sizes[chance.randrange(len(tensor.sizes))] = chance.choice(WHOLE)
    elif how == 1:
        tensor.sizes.reverse()
    else:
        tensor.sizes.append(chance.choice((0, 1, 2)))


def _kind_of_tensor(parts: Parts, chance: Random) -> None:
    kinds = (*range(17), 20, 24, 26, 28, 30, 39, 41, 99, (1 << 32) - 1)
    chance.choice(parts.tensors).kind = chance.choice(kinds)


def _place(parts: Parts, chance: Random) -> None:
    others = [tensor.place for tensor in parts.tensors[:5]]
    places = (0, 1, 17, 32, len(parts.data), len(parts.data) - 1, 1 << 62, (1 << 64) - 1, *others)
    chance.choice(parts.tensors).place = chance.choice(places)


def _no_tensor(parts: Parts, chance: Random) -> None:
    parts.tensors.remove(chance.choice(parts.tensors))


def _new_tensor(parts: Parts, chance: Random) -> None:
    one = chance.choice(parts.tensors)
    name = chance.choice((one.name, *TENSORS))
    place = chance.choice((one.place, len(parts.data)))
    if place == len(parts.data):
        parts.data += bytes(4096)
    parts.tensors.append(Entry(name, list(one.sizes), one.kind, place))


def _swapped(parts: Parts, chance: Random) -> None:
    one, other = chance.choice(parts.tensors), chance.choice(parts.tensors)
    one.name, other.name = other.name, one.name


def _factors(parts: Parts, chance: Random) -> None:
    """Numbers by which the frequencies of rotary embeddings are divided."""
    count = chance.choice((1, 3, 4, 8, 64, 1000, 3000))
    steps = [1 + 7 * n / count for n in range(count)]
    values = chance.choice((steps, [1.0] * count, [chance.choice(REAL)] * count))
    parts.tensors.append(Entry(b"rope_freqs.weight", [count], 0, len(parts.data)))
    parts.data += struct.pack(f"<{count}f", *values) + bytes(-4 * count % 32)


def _counts(parts: Parts, chance: Random) -> None:
    counts = (len(parts.tensors), chance.choice(WHOLE)), (chance.choice(WHOLE), len(parts.keys))
    parts.counts = chance.choice(counts)


def _data(parts: Parts, chance: Random) -> None:
    parts.data = _noise(parts.data, chance, len(parts.data))


def _many(parts: Parts, chance: Random) -> None:
    """Thousands of keys, or of control tokens."""
    if chance.random() < 0.5:
        parts.keys += [Key(b"k%d" % n, STRING, b"v" * 100) for n in range(3000)]
        return
    count = 20_000
    parts.set(b"tokenizer.ggml.tokens", ARRAY, (STRING, [b"<|%d|>" % n for n in range(count)]))
    parts.set(b"tokenizer.ggml.token_type", ARRAY, (5, [3] * count))


_CHANGES = (
    *(_key, _key, _key, _key, _kind_of_key, _no_key, _key_twice, _new_key, _new_key, _raw_array),
    *(_sizes, _kind_of_tensor, _place, _no_tensor, _new_tensor, _swapped, _factors, _counts, _data),
)


def _gguf(content: bytes, chance: Random) -> tuple[bytes, str]:
    parts = Parts.of(content)
    what = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        change = _many if chance.random() < 0.005 else chance.choice(_CHANGES)
        if parts.keys and parts.tensors:
            change(parts, chance)
            what.append(change.__name__.lstrip("_"))
    made = parts.file()
    if chance.random() < 0.2:
        made, _ = _noise(made, chance, len(made) - len(parts.data)), what.append("noise")
    if chance.random() < 0.05:
        made, _ = made[: chance.randrange(len(made))], what.append("cut")
    return made, ", ".join(what)
