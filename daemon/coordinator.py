"""The coordinator process: from a CoordinatorConfig to a running D0."""

from __future__ import annotations

import logging
import secrets
import socket
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from edgespec.backends.compute import CoordinatorCompute
from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.access_list import clean_name
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.advertising import Advertising
from edgespec.daemon.api_process import ApiOptions, ApiProcess
from edgespec.daemon.cache_rows import cache_rows, state_rows
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.emulation import coordinator_pace, described, emulated_costs
from edgespec.daemon.health import UNKNOWN, SensorReader
from edgespec.daemon.layer_assignment import LayerAssignment
from edgespec.daemon.memory import give_back, yet_to_take
from edgespec.daemon.model_names import names_of, published_sampling
from edgespec.daemon.notify import Notifier
from edgespec.daemon.own_stage import OwnStage, address_beside, admitted, machine_needs
from edgespec.daemon.planning import planned_needs
from edgespec.daemon.precision import precision_text
from edgespec.daemon.process import exit_code, going_on, take_file_descriptors
from edgespec.daemon.settings import context_of, look_at_models
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.drafting.choice import parse_draft
from edgespec.model.hub import require_within_reach
from edgespec.model.own_sampling import own_sampling
from edgespec.net.block_server import BlockServer
from edgespec.net.discovery_interfaces import reached_at
from edgespec.net.emulated_link import PacedTransport
from edgespec.net.slowness import slowness
from edgespec.planning.architecture import architecture_of
from edgespec.planning.cost_model import draft_head
from edgespec.planning.costs import RingCosts
from edgespec.planning.memory import SPECULATIVE_ROWS
from edgespec.ring.health import home_status
from edgespec.ring.membership import MembershipMachine
from edgespec.runtime.access_policy import STAGE, admits
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.instrumentation import Instrumentation
from edgespec.runtime.request_log import RequestLog
from edgespec.runtime.trace import Trace
from edgespec.types.features import NO_NEEDS
from edgespec.types.thinking import thinking_in
from edgespec.types.tool_forms import form_in
from edgespec.types.usual_sampling import UsualSampling
from edgespec.wire.client_messages import NodeStatus
from edgespec.wire.messages import Assign, Connect

if TYPE_CHECKING:
    import torch

    from edgespec.daemon.ring_model import RingModel
    from edgespec.drafting.grower import TreeGrower
    from edgespec.drafting.vocabulary import AnswerTokens
    from edgespec.model.ends import OutputHead
    from edgespec.model.tokenizer import Tokenizer

SECRET_BYTES = 32
"""Of what the keys of all rings are made from."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Home:
    """What a coordinator has before its models: settings, keys, sockets.

    `costs`: of an emulated ring. `own`: the stage on this machine. `ends`: closes the node's
    resources.
    """

    config: CoordinatorConfig
    cluster: ClusterFolder
    access_policy: AccessStore
    transport: PacedTransport
    costs: RingCosts | None
    own: ClusterFolder | None
    ends: ExitStack


def run_coordinator(
    config: CoordinatorConfig,
    cluster: ClusterFolder,
    http: Address | None,
    api_options: ApiOptions | None = None,
    drain: float = 0.0,
    *,
    unloads: bool = False,
) -> int:
    """Serve the devices and clients of a cluster until a signal ends it; returns the exit code.

    `http`: address of the HTTP API, served by a child process; None: no API. `drain`: seconds that
    requests have to end after the signal. `unloads`: stages keep no layers in memory after it.
    The address is bound, and printed as the only line on standard output, before the models are
    loaded, so that stages can start meanwhile. Raises ConfigError for settings, models or an
    address that cannot be used.
    """
    look_at_models(config)
    for model in (config.model, *parse_draft(config.draft).folders):
        require_within_reach(model)
    quants = config.quantisation, config.head_quantisation
    if text := precision_text(*quants, config.dtype, config.cache_dtype):
        log.info(text)
    take_file_descriptors()
    access_policy = AccessStore(cluster)
    costs = (
        emulated_costs(config.emulation, config.stages, config.head_last)
        if config.emulation
        else None
    )
    trace = Trace(config.trace) if config.trace else None
    requests = RequestLog(config.record) if config.record else None
    transport = PacedTransport.coordinator(
        config.address, cluster.identity, partial(admits, access_policy)
    )
    ends = ExitStack()
    try:
        address = Address(config.address.host, transport.control_port)
        print(f"coordinator at {reached_at(address)[0]}", flush=True)
        if costs is not None:
            log.warning(described(costs))
        beside = address_beside(config, transport.control_port)
        own = admitted(cluster, access_policy, beside) if config.with_stage else None
        home = Home(config, cluster, access_policy, transport, costs, own, ends)
        with going_on("loading the models"):
            node, blocks = _build(home, trace)
    except BaseException:
        ends.close()
        transport.close()
        raise
    log.info("cluster %s: waiting for %d stage(s)", cluster.cluster_id, config.stages)
    if config.stages > bool(config.with_stage):
        log.info("on each other device: %s", _join_words(config, cluster))
    blocks.start()
    advertising = Advertising(config, transport.control_port, cluster.cluster_id)
    advertising.start()
    node.supervisor = Notifier(slow=slowness())
    node.requests = requests
    node.keep_holders = cluster.keep_holders
    node.drain, node.unloads = drain, unloads
    api = ApiProcess(http, address, cluster, api_options) if http else nullcontext()
    stage = _own_stage(config, own, beside) if own is not None else nullcontext()
    try:
        with ends, api, stage:
            return exit_code(node.run(f"waiting for {config.stages} stage(s)"))
    finally:
        advertising.stop()
        blocks.stop()
        if requests is not None:
            requests.close()


def _own_stage(config: CoordinatorConfig, own: ClusterFolder, address: Address) -> OwnStage:
    """The stage beside this coordinator, which has loaded its models: the memory that is left is
    the stage's, less what the coordinator is planned to take while it answers."""
    from edgespec.model.tensors import best_device

    device = best_device().type
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()  # what held the originals of head and draft
    needs = machine_needs(config)
    reserved = yet_to_take(needs.coordinator, device) if needs else 0
    return OwnStage(config, own, address, reserved)


def _build(home: Home, trace: Trace | None) -> tuple[CoordinatorNode, BlockServer]:
    """Load the models; put the node and its block server together."""
    from edgespec.backends.torch_backend import TorchHead

    config, costs = home.config, home.costs
    loaded = Loaded.load(home)
    machine = CoordinatorMachine(loaded.ring, loaded.codec)
    planned: list[Assign] = []
    blocks = BlockServer(
        Address(config.address.host, 0),
        home.cluster.identity.own,
        partial(admits, home.access_policy, blocks=True),
        partial(loaded.model.prepare, planned),
        busy=lambda: machine.is_working,
    )
    like = loaded.assign(blocks.port)
    model = loaded.model
    assignment = LayerAssignment(model.layers, like, config.layers, planned, model.bound)
    draft = loaded.draft
    pace = None if costs is None else lambda _: coordinator_pace(costs, draft)
    node = CoordinatorNode(
        home.transport,
        CoordinatorCompute(TorchHead(loaded.head) if loaded.head else None, draft),
        machine,
        _membership(home, loaded, machine, assignment),
        home.access_policy,
        Instrumentation(home.transport, pace, trace),
    )
    if (own := loaded.answers) is not None:
        node.answered = lambda answer: own.add(answer.token_ids, idle=not machine.is_working)
    return node, blocks


@dataclass(frozen=True, slots=True)
class Loaded:
    """The coordinator's models in memory; `head`: None if the last stage has it."""

    config: CoordinatorConfig
    model: RingModel
    device: torch.device
    head: OutputHead | None
    draft: TreeGrower | None
    codec: Tokenizer
    usual: UsualSampling
    """How it is sampled where a request does not say."""
    answers: AnswerTokens | None = None
    """Which tokens answers have, if that decides what is guessed; None: all tokens are."""

    @staticmethod
    def load(home: Home) -> Loaded:
        # torch and transformers take seconds to import: not before the address is taken.
        from edgespec.daemon.ring_model import RingModel
        from edgespec.drafting.registry import BaseParts, build_draft
        from edgespec.drafting.vocabulary import AnswerTokens
        from edgespec.model.ends import OutputHead
        from edgespec.model.tensors import best_device

        config, head = home.config, None
        model, device = RingModel(config), best_device()
        if not config.head_last:
            log.info("loading the output head of %s", config.model)
            head = OutputHead(kept := model.kept_head(), config.dtype, device)
            give_back(kept, device)
        choice = parse_draft(config.draft)
        if choice.members:
            log.info("loading the draft source %s", choice)
        own_head = draft_head(config.head_quantisation)
        base = BaseParts(
            *(model.tokenizer, model.head, head, config.dtype, device),
            *(config.draft_quantisation, own_head),
        )
        answers = None
        if choice.needs_rows and base.guessed is not None:
            file = home.cluster.path / f"answer-tokens-{base.vocab_size}"
            answers = AnswerTokens(file, base.vocab_size)
            home.ends.callback(answers.save)
            base = replace(base, counts=answers.counts)
        draft = build_draft(choice, base)
        usual = own_sampling(model.tokenizer, published_sampling(config.model))
        codec = _codec(model, home.ends)
        return Loaded(config, model, device, head, draft, codec, usual, answers)

    @property
    def context_length(self) -> int:
        return context_of(self.config, self.model.longest_context)

    @property
    def rows(self) -> int:
        """Of one request of full length, for which every device is planned (planning.memory); when
        the ring is up, of as many as there is memory for."""
        return self.context_length + SPECULATIVE_ROWS + self.state_rows

    @property
    def state_rows(self) -> int:
        """Those that a request counts as more, for states that it has on the stages."""
        from edgespec.model.families import folds  # late: it imports torch

        model, config = self.model.head.config, self.config
        if not folds(model):
            return 0
        of = architecture_of(model.settings, config.model)
        return state_rows(of, config.cache_dtype or config.dtype)

    @property
    def ring(self) -> CoordinatorSettings:
        """What the machine has to know of its ring."""
        from edgespec.model.families import folds  # late: it imports torch

        config, draft = self.config, self.draft
        return CoordinatorSettings(
            config.stages,
            self.context_length,
            draft.name if draft else "",
            recovery=config.timing.recovery,
            kept_rows=self.rows,
            shares_prefixes=config.share_prefixes,
            needs=draft.needs if draft else NO_NEEDS,
            sources=draft.sources if draft else (),
            head_last=config.head_last,
            live=config.live,
            vocabulary=int(self.model.head.config.vocab_size),
            own_stage=config.with_stage,
            usual=self.usual,
            folds=folds(self.model.head.config),
            state_rows=self.state_rows,
        )

    def assign(self, blocks_port: int) -> Assign:
        """What the assignments of all stages share."""
        config = self.config
        return Assign(
            stage=0,
            stages=config.stages,
            first=0,
            end=0,
            model=self.model.name,
            fingerprint=self.model.fingerprint,
            dtype=config.dtype,
            quantisation=config.quantisation.name,
            context_length=self.context_length,
            blocks_port=blocks_port,
            ring_key=secrets.token_hex(SECRET_BYTES),
            head=config.head_quantisation.name if config.head_last else "",
            rows=self.rows,
            cache_dtype=config.cache_dtype,
        )


def _codec(model: RingModel, ends: ExitStack) -> Tokenizer:
    """The tokenizer, with processes of its own for templates and grammars that clients give, which
    start with the first of them."""
    from edgespec.model.grammar_process import COMPILE_S, GrammarProcess
    from edgespec.model.template_process import RENDER_S, TemplateProcess
    from edgespec.model.tokenizer import Tokenizer

    codec = Tokenizer(model.tokenizer, is_kept=True)
    _ = codec.bound  # found here, and not while the first prompt waits
    if codec.chat_template:
        templates = TemplateProcess(
            codec.chat_template, codec.special_tokens, RENDER_S * slowness()
        )
        ends.callback(templates.close)
        codec.render = templates.render
    grammars = GrammarProcess(lambda: codec.vocabulary, COMPILE_S * slowness())
    ends.callback(grammars.close)
    codec.try_grammar = grammars.check
    return codec


def _membership(
    home: Home, loaded: Loaded, machine: CoordinatorMachine, assignment: LayerAssignment
) -> MembershipMachine:
    config, cluster, context = home.config, home.cluster, loaded.context_length
    device = loaded.device.type
    # An emulated ring is what was asked for.
    can_replan = loaded.model.can_be_cut_anew and home.costs is None
    what = "the ring cannot be shared out anew when a device is lost"
    needs = planned_needs(config, context, what, with_draft=False) if can_replan else None
    rows, row_bytes = cache_rows(config, context, device)
    costs = needs.model.costs if needs else None
    names, template = names_of(config.model), loaded.codec.chat_template
    if config.name:
        names = tuple(dict.fromkeys((config.name, *names)))
    return MembershipMachine(
        assignment.assigned,
        Connect("", home.transport.data_port, cluster.identity.own.public),
        config.timing,
        requests=machine.load,
        live=machine.live,
        names=_names(config, home.own),
        replan=partial(assignment.repartition, needs) if needs else None,
        own_keys=[one.identity.own.public for one in (cluster, home.own) if one is not None],
        rows=rows,
        rows_told=lambda: (*machine.rows_told(), row_bytes),
        here=partial(_here, home.ends.enter_context(SensorReader(device))),
        plain=machine.learnt.plain_speed,
        about=partial(
            structs.replace,
            model=names[0],
            names=names,
            tools=form_in(template),
            thinking=thinking_in(template),
            usual=loaded.usual,
            draft=loaded.draft.name if loaded.draft else "",
            size=costs.layers * costs.layer_bytes + costs.head.bytes if costs else 0,
        ),
        own_stage=config.with_stage,
        holders=cluster.holders(),
    )


def _join_words(config: CoordinatorConfig, cluster: ClusterFolder) -> str:
    """What to enter on the other devices."""
    known = sum(device.role == STAGE for device in AccessStore(cluster).devices())
    if known >= config.stages:
        return "edgespec join"
    return (
        "edgespec join TOKEN, with the token that `edgespec init` printed (`edgespec token new` "
        "makes another), or without one if it is admitted already"
    )


def _here(sensors: SensorReader) -> NodeStatus:
    """How this machine is."""
    return home_status(clean_name(socket.gethostname()), sensors.latest() or UNKNOWN)


def _names(config: CoordinatorConfig, own: ClusterFolder | None) -> list[str]:
    """Who is planned for stages 1, 2, …: the own stage for its one, by the name that it has."""
    names = list(config.places) or [""] * config.stages
    if own is not None:
        names[config.with_stage - 1] = own.name
    return names
