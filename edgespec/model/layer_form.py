"""Layer form: what a family's decoder layer computes, as far as edgespec's own layer knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from edgespec.errors import ModelError
from edgespec.kernels.rows import CLAMPED, UNGATED
from edgespec.model.families import FAMILIES
from edgespec.model.kv_cache import RowForm
from edgespec.model.latent import LatentForm, latent_form
from edgespec.model.mixture import ROUTER, MixtureForm
from edgespec.model.model_config import CONVOLUTION, MIXTURE, MLP, SLIDING, ModelConfig
from edgespec.model.state_form import StateForm, state_form
from edgespec.planning.architecture import ACTIVE, EXPERTS, WIDTHS
from edgespec.planning.text_part import CONVOLVING, DELTA, GROUPED, SHARING

MLP_GATE = "mlp.shared_expert_gate.weight"
"""Makes of a row the number whose sigmoid is the share of what the MLP gives."""

_HUNYUANS = ("hunyuan_v1_dense", "hunyuan_v1_moe")
_ERNIES = ("ernie4_5", "ernie4_5_moe")
_OLMOS = ("olmo2", "olmo3")
_NORMED_HEADS = (
    *("qwen3", "qwen3_moe", "exaone4", "gemma3_text", *DELTA, *CONVOLVING, *_HUNYUANS),
    *(_NORMED_WHOLE := (*_OLMOS, "olmoe")),
)
_GEMMAS = ("gemma2", "gemma3_text")
_QWENS = ("qwen2", "qwen2_moe")
_MLP_BIAS = ("llama", "granite", "smollm3", "seed_oss")
_NO_BIAS = (
    *("mistral", "ministral", "ministral3", "mixtral", "phi3", "nemotron_h", "exaone4"),
    *CONVOLVING,
)
_GRANITES = ("granite", "granitemoehybrid")
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", UNGATED)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One decoder layer: norm, mixer, norm, gated MLP, each of the two added to what entered. What
    mixes a row with those before it is attention, maybe over `latent` rows, or a short convolution
    if there are `taps`, or the `state` that they left, or, with `heads` too, attention beside that.

    `heads` 0: it does not attend. `taps`: rows that a convolution reads, its own included. `inner`:
    width of the MLP, 0 where there is none, or a `mixture` stands in its place; with both, what
    they give is added, of the MLP the share that a `mlp_gate` makes of the row, if there is one.
    `alone`: it has a mixer or an MLP alone, and one norm. `fused`: whether the checkpoint has one
    matrix for queries, keys and values, and one for gate and up; `fused_up`: the latter alone.
    `gated`: queries come with a gate each, of what their attention gives. `head_norms`: each
    head's queries and keys are normed.
    `around`: what attention and MLP give is normed too, before it is added; `behind`: that alone,
    not what enters them. `parallel`: attention and MLP are given the same normed row. `centred`:
    norms are of rows less their mean. `normed_whole`: all queries are normed as one, and all keys;
    `normed_last`: behind their turning. `paired`: numbers that are turned together are neighbours.
    `sinks`: see AttentionForm. `above_one`: a norm's gain is 1 + its weight. `window`: see
    Visibility. `softcap`: c of c · tanh(score / c). `turned`: whether rotary embeddings are
    applied. `share`: what attention or a convolution adds counts so much; `mlp_share`: what the MLP
    does, whose norm gives `mlp_gain` times as much.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    activation: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp_gate: bool = False
    fused: bool = False
    fused_up: bool = False
    gated: bool = False
    head_norms: bool = False
    normed_whole: bool = False
    normed_last: bool = False
    paired: bool = False
    sinks: bool = False
    around: bool = False
    behind: bool = False
    parallel: bool = False
    centred: bool = False
    above_one: bool = False
    window: int | None = None
    softcap: float | None = None
    turned: bool = True
    share: float = 1.0
    mlp_share: float = 1.0
    mlp_gain: float = 1.0
    alone: bool = False
    taps: int = 0
    taps_bias: bool = False
    state: StateForm | None = None
    latent: LatentForm | None = None
    mixture: MixtureForm | None = None

    def rows(self, held_as: torch.dtype) -> RowForm:
        """What its layer holds of each row, in numbers of that type."""
        folded = 0 if self.state is None else self.state.folded(held_as)
        if self.latent is not None:
            return self.latent.row
        if self.attends:
            return RowForm(self.kv_heads, self.head_dim, folded=folded)
        return RowForm(1, self.hidden if self.taps else 0, parts=1, folded=folded)

    @property
    def projects(self) -> bool:
        """Whether it has the matrices of `qkv_names`."""
        return self.heads > 0 and self.latent is None

    @property
    def attends(self) -> bool:
        """Whether its rows have queries, keys and values."""
        return self.projects and not self.taps

    @property
    def reach(self) -> int | None:
        """How many positions a row reads, its own included; None: all."""
        return self.taps or self.window

    @property
    def qkv_names(self) -> tuple[str, ...]:
        """Matrices of queries, keys and values, one below the other; of a convolution the one of
        gates before it, gates after it and inputs."""
        if self.taps:
            return ("conv.in_proj",)
        names = ("qkv",) if self.fused else ("q", "k", "v")
        return tuple(f"self_attn.{name}_proj" for name in names)

    @property
    def out_name(self) -> str:
        """The matrix behind attention or the convolution."""
        return "conv.out_proj" if self.taps else "self_attn.o_proj"

    @property
    def gate_up_names(self) -> tuple[str, ...]:
        """Matrices of gate and up, one below the other; the latter alone where nothing gates."""
        if self.activation == UNGATED:
            return ("mlp.up_proj",)
        fused = self.fused or self.fused_up
        return ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj")

    @property
    def norm_names(self) -> tuple[str, str, str, str]:
        """Norms before and behind attention, before and behind the MLP; "" where there is none."""
        if self.alone:
            return (
                ("", "", "input_layernorm", "") if self.inner else ("input_layernorm", "", "", "")
            )
        attended, last = "post_attention_layernorm", "post_feedforward_layernorm"
        if self.parallel:
            return "input_layernorm", "", "", ""
        if self.behind:
            return "", attended, "", last
        if not self.around:
            return "input_layernorm", "", attended, ""
        return "input_layernorm", attended, "pre_feedforward_layernorm", last

    @property
    def matrices(self) -> frozenset[str]:
        """The tensors that rows are multiplied by, but for a router and a gate of the MLP: they are
        small, and their errors change everything."""
        every, plain = self.shapes().items(), (f"mlp.{ROUTER}", MLP_GATE)
        return frozenset(n for n, shape in every if len(shape) == 2 and n not in plain)

    def shapes(self) -> dict[str, torch.Size]:
        """All tensors of a layer, by their names in it; matrices [out, in], all else flat."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        outs: tuple[int, ...] = (width * (1 + self.gated), kv_width, kv_width)
        found: dict[str, torch.Size] = {}

        def add(name: str, out: int, columns: int, bias: bool) -> None:
            found[f"{name}.weight"] = torch.Size((out, columns))
            if bias:
                found[f"{name}.bias"] = torch.Size((out,))

        if self.taps:
            outs, width = (3 * self.hidden,), self.hidden
            add("conv.conv", self.hidden, self.taps, self.taps_bias)
            found["conv.conv.weight"] = torch.Size((self.hidden, 1, self.taps))
        elif self.fused:
            outs = (sum(outs),)
        if self.state is not None:
            found |= self.state.shapes()
        if self.latent is not None:
            found |= self.latent.shapes()
        if self.projects:
            for name, out in zip(self.qkv_names, outs, strict=True):
                add(name, out, self.hidden, self.taps_bias if self.taps else self.qkv_bias)
            add(self.out_name, self.hidden, width, self.taps_bias if self.taps else self.out_bias)
        if self.head_norms and self.attends:
            for name, heads in (("q", self.heads), ("k", self.kv_heads)):
                count = self.head_dim * (heads if self.normed_whole else 1)
                found[f"self_attn.{name}_norm.weight"] = torch.Size((count,))
        if self.sinks:
            found["self_attn.sinks"] = torch.Size((self.heads,))
        if self.mixture is not None:
            found |= {f"mlp.{name}": shape for name, shape in self.mixture.shapes().items()}
        if self.mlp_gate:
            found[MLP_GATE] = torch.Size((1, self.hidden))
        if self.inner:
            inner = 2 * self.inner if self.fused or self.fused_up else self.inner
            for name in self.gate_up_names:
                add(name, inner, self.hidden, self.mlp_bias)
            add("mlp.down_proj", self.hidden, self.inner, self.mlp_bias)
        for name in filter(None, self.norm_names):
            found[f"{name}.weight"] = torch.Size((self.hidden,))
        return found


def layer_form(config: ModelConfig, index: int) -> LayerForm:
    """The form of layer `index` of a model. Raises ModelError for an unknown activation."""
    kind = config.model_type
    gemma = kind in _GEMMAS
    name = "hidden_activation" if gemma else "hidden_act"
    activation = getattr(config, name, "silu")
    if activation not in _ACTIVATIONS:
        raise ModelError(
            f"{name} in config.json is {activation!r}, edgespec computes "
            f"{', '.join(_ACTIVATIONS)}; use the original release"
        )
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    hybrid, falcon, alone = (kind == one for one in ("granitemoehybrid", "falcon_h1", "nemotron_h"))
    state, mlp = state_form(config, index), alone and config.layer_types[index] in (MLP, MIXTURE)
    gain, down = config.mlp_multipliers if falcon else (1.0, 1.0)
    share = mlp_share = float(config.residual_multiplier) if kind in _GRANITES else 1.0
    if falcon:
        share = float(config.attention_in_multiplier * config.attention_out_multiplier)
        mlp_share = float(down / gain)
    convolves = kind in CONVOLVING and config.layer_types[index] == CONVOLUTION
    if kind in _QWENS:
        biased = kind == "qwen2" or bool(config.qkv_bias)
    elif kind in _ERNIES:
        biased = bool(config.use_bias)
    else:
        biased = kind not in _NO_BIAS and bool(config.attention_bias)
    out_biased = biased and kind not in (*_QWENS, "glm4", "glm4_moe")
    if kind == "seed_oss":
        out_biased = bool(config.attention_out_bias)
    cohere = kind == "cohere2"
    softcap = config.attn_logit_softcapping if kind == "gemma2" else None
    mixture = _mixture(config, index)
    return LayerForm(
        hidden=hidden,
        inner=0 if alone and not mlp else _inner(config, mixture),
        heads=0 if mlp or (state is not None and not falcon) else heads,
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        eps=float(config.layer_norm_eps if cohere else config.rms_norm_eps),
        scaling=_scaling(config, head_dim),
        activation=CLAMPED if kind == "gpt_oss" else activation,
        qkv_bias=biased,
        out_bias=out_biased,
        mlp_bias=bool(config.mlp_bias) if kind in _MLP_BIAS else kind in _ERNIES and biased,
        mlp_gate=mixture is not None and kind in SHARING,
        fused=kind == "phi3",
        fused_up=hybrid or kind == "glm4",
        head_norms=kind in _NORMED_HEADS or (kind == "glm4_moe" and bool(config.use_qk_norm)),
        normed_whole=kind in _NORMED_WHOLE,
        normed_last=kind in _HUNYUANS,
        paired=kind in ("glm4", "cohere2", *_ERNIES),
        sinks=kind == "gpt_oss",
        around=gemma or kind == "glm4",
        behind=kind in (*_OLMOS, "exaone4"),
        parallel=cohere,
        centred=cohere,
        above_one=gemma or kind == "gemma" or kind in DELTA,
        gated=kind in DELTA,
        window=_window(config, index),
        softcap=None if softcap is None else float(softcap),
        turned=_is_turned(config, index),
        share=share,
        mlp_share=mlp_share,
        mlp_gain=float(gain),
        alone=alone,
        taps=int(config.conv_L_cache) if convolves else 0,
        taps_bias=convolves and bool(config.conv_bias),
        state=state,
        latent=latent_form(config),
        mixture=mixture,
    )


def _mixture(config: ModelConfig, index: int) -> MixtureForm | None:
    """The experts of layer `index`; None where it has none."""
    kind = config.model_type
    experts = int(getattr(config, EXPERTS[kind]) or 0) if kind in EXPERTS else 0
    if not experts or _is_dense(config, index):
        return None
    form = MixtureForm(
        hidden=int(config.hidden_size),
        inner=int(getattr(config, WIDTHS.get(kind, "intermediate_size"))),
        experts=experts,
        active=int(getattr(config, ACTIVE.get(kind, "num_experts_per_tok")) or 0),
        biased=False,
        normed=True,
        softmax=True,
    )
    if kind in ("granitemoehybrid", "mixtral", "qwen3_5_moe_text"):
        return form  # or the softmax of what the chosen have, which is the same
    if kind == "gpt_oss":
        clamp = float(config.swiglu_alpha), float(config.swiglu_limit)
        return replace(form, clamp=clamp, affine=True)
    if kind in _HUNYUANS:
        return replace(form, wide=True)
    if kind == "ernie4_5_moe":
        return replace(form, wide=True, biased=True, floor=float(config.moe_norm_min))
    if kind in ("qwen3_moe", "olmoe", *SHARING):
        return replace(form, normed=bool(config.norm_topk_prob))
    normed, scaling = bool(config.norm_topk_prob), float(config.routed_scaling_factor)
    form = replace(form, softmax=False, normed=normed, scaling=scaling)
    if kind == "nemotron_h":
        form = replace(form, gated=False)
    if kind == "lfm2_moe":
        return replace(form, biased=bool(config.use_expert_bias), least=1e-6)
    groups, kept = int(config.n_group or 1), int(config.topk_group or 1)
    if kind == "deepseek_v2":
        groups = groups if config.topk_method == "group_limited_greedy" else 1
        form = replace(form, softmax=True, normed=False, wide=True)
        return replace(form, groups=groups, kept_groups=kept, best=1)
    return replace(form, biased=True, least=1e-20, wide=True, groups=groups, kept_groups=kept)


def _is_dense(config: ModelConfig, index: int) -> bool:
    """Whether a layer of a mixture has no experts."""
    kind = config.model_type
    if kind == "nemotron_h":
        return bool(config.layer_types[index] != MIXTURE)
    if kind == "lfm2_moe":
        return index < int(config.num_dense_layers)
    if kind in GROUPED:
        return index < int(getattr(config, "first_k_dense_replace", 1))
    if kind == "ernie4_5_moe":
        first, last = int(config.moe_layer_start_index), int(config.moe_layer_end_index)
        return not first <= index <= last or (index + 1) % int(config.moe_layer_interval) > 0
    if kind not in ("qwen2_moe", "qwen3_moe", "qwen3_next"):
        return False
    step = int(config.decoder_sparse_step)
    return index in (config.mlp_only_layers or ()) or (index + 1) % step > 0


def _inner(config: ModelConfig, mixture: MixtureForm | None) -> int:
    """The width of a layer's MLP, 0 where there is none beside the experts."""
    kind = config.model_type
    if kind == "granitemoehybrid":
        return int(config.shared_intermediate_size)
    if mixture is None or kind in _HUNYUANS:
        return int(config.intermediate_size)
    if kind in GROUPED:
        return int(config.n_shared_experts) * mixture.inner
    if kind == "ernie4_5_moe":
        return int(config.moe_num_shared_experts) * mixture.inner
    beside = kind == "nemotron_h" or kind in SHARING
    return int(config.shared_expert_intermediate_size) if beside else 0


def _is_turned(config: ModelConfig, index: int) -> bool:
    """Whether a layer's queries and keys are turned by their positions."""
    if config.model_type == "granitemoehybrid":
        return bool(config.position_embedding_type == "rope")
    if config.model_type == "nemotron_h":
        return False
    if config.model_type in ("cohere2", "exaone4"):  # but where all see all
        window = config.sliding_window is not None
        slides = config.layer_types[index] == SLIDING
        return slides if config.model_type == "cohere2" else slides or not window
    return config.model_type != "smollm3" or bool(config.no_rope_layers[index])


def _scaling(config: ModelConfig, head_dim: int) -> float:
    """What scores are multiplied by."""
    if config.model_type in _GEMMAS:
        return float(config.query_pre_attn_scalar**-0.5)
    if config.model_type in _GRANITES:
        return float(config.attention_multiplier)
    if config.model_type == "falcon_h1":  # of queries and keys, whose rotation it commutes with
        keys = config.attention_in_multiplier**2 * config.key_multiplier
        return float(head_dim**-0.5 * keys)
    return float(head_dim**-0.5)


def _window(config: ModelConfig, index: int) -> int | None:
    windows = FAMILIES[config.model_type].windows
    used = windows == "all" or (windows == "by type" and config.layer_types[index] == SLIDING)
    window = config.sliding_window if used else None
    return None if window is None else int(window)
