"""The coordinator process: from a CoordinatorConfig to a running D0."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from edgespec.backends.compute import CoordinatorCompute
from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.advertising import Advertising
from edgespec.daemon.emulation import coordinator_pace, described, emulated_costs
from edgespec.daemon.notify import Notifier
from edgespec.daemon.process import exit_code
from edgespec.errors import ConfigError, ModelError
from edgespec.machines.admission import Ring
from edgespec.machines.coordinator import CoordinatorMachine
from edgespec.machines.membership import MembershipMachine
from edgespec.model.hub import is_hub_id
from edgespec.net.block_server import BlockServer
from edgespec.net.discovery_interfaces import EVERY_ADDRESS
from edgespec.net.emulated_link import PacedTransport
from edgespec.planning.costs import RingCosts
from edgespec.planning.partition import blocks_of
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.equipment import Equipment
from edgespec.runtime.trace import Trace
from edgespec.wire.messages import Assign

log = logging.getLogger("edgespec")


def run_coordinator(config: CoordinatorConfig) -> int:
    """Serve until a signal ends it; returns the exit code.

    The address is taken, and printed as the one line on standard output, before the models are
    loaded, so that stages can start meanwhile. Raises ConfigError for settings, models or an
    address that cannot be used.
    """
    _look_at_models(config)
    costs = emulated_costs(config.emulation, config.stages) if config.emulation else None
    trace = Trace(config.trace) if config.trace else None
    transport = PacedTransport.coordinator(config.address)
    try:
        address = f"{config.address.host}:{transport.control_port}"
        print(f"coordinator at {address}", flush=True)
        if config.address.host not in ("127.0.0.1", "localhost", "::1"):
            log.warning("anyone who reaches %s can use this ring: there are no keys yet", address)
        if costs is not None:
            log.warning(described(costs))
        node, blocks = _build(config, transport, costs, trace)
    except BaseException:
        transport.close()
        raise
    way = "" if config.address.host == EVERY_ADDRESS else f" --coordinator {address}"
    log.info("waiting for %d stage(s): edgespec join --stage N%s", config.stages, way)
    blocks.start()
    advertising = Advertising(config, transport.control_port)
    advertising.start()
    node.supervisor = Notifier()
    try:
        return exit_code(node.run(f"waiting for {config.stages} stage(s)"))
    finally:
        advertising.stop()
        blocks.stop()


def _look_at_models(config: CoordinatorConfig) -> None:
    """Find the commonest mistakes at once: before anything is imported, and stages are started."""
    for path in filter(None, (config.model, config.draft)):
        if not Path(path).is_dir() and not is_hub_id(path):
            raise ModelError(
                f"there is no model folder {path}; give a folder with config.json, a tokenizer and "
                "*.safetensors files, such as `huggingface-cli download MODEL --local-dir DIR` "
                "makes, or ORGANISATION/NAME of a model on the Hugging Face Hub"
            )
    try:
        settings = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
        layers = int(settings["num_hidden_layers"])
        longest = int(settings.get("max_position_embeddings", config.context))
    except (OSError, ValueError, KeyError, TypeError):
        return  # the loader knows what to say
    blocks_of(layers, config.stages, config.layers)
    _context_of(config, longest)


def _context_of(config: CoordinatorConfig, longest: int) -> int:
    """Tokens that a request may have. Raises ConfigError if that is more than the model takes."""
    if config.context > longest:
        raise ConfigError(
            f"a context of {config.context} tokens is more than {config.model} takes; the most is "
            f"{longest}"
        )
    return config.context or longest


def _build(
    config: CoordinatorConfig,
    transport: PacedTransport,
    costs: RingCosts | None,
    trace: Trace | None,
) -> tuple[CoordinatorNode, BlockServer]:
    """Load head, draft and tokenizer; put the node and its block server together."""
    # torch and transformers take seconds to import: not before the address is taken.
    from edgespec.backends.torch_backend import TorchHead
    from edgespec.daemon.ring_model import RingModel, quantising
    from edgespec.drafting.independent import IndependentDraft
    from edgespec.model.device import best_device
    from edgespec.model.ends import OutputHead
    from edgespec.model.hub import local_folder
    from edgespec.model.loader import Checkpoint
    from edgespec.model.tokenizer import Tokenizer, require_same_tokenizer

    model = RingModel(config)
    log.info("loading the output head of %s", config.model)
    device = best_device()
    head = OutputHead(model.head, config.dtype, device)
    draft = None
    if config.draft:
        require_same_tokenizer(model.tokenizer, local_folder(config.draft))
        log.info("loading the draft model %s", config.draft)
        source = quantising(Checkpoint(config.draft), config.draft_quantisation)
        draft = IndependentDraft(source, config.dtype, device, vocab_size=head.vocab_size)
    context_length = _context_of(config, model.longest_context)
    name = draft.name if draft else ""
    ring = Ring(config.stages, context_length, name, recovery=config.timing.recovery)
    machine = CoordinatorMachine(ring, Tokenizer(model.tokenizer))
    places: list[Assign] = []
    blocks = BlockServer(
        Address(config.address.host, 0),
        transport.ring_key,
        model.serving(places),
        busy=lambda: machine.is_working,
    )
    split = blocks_of(model.layers, config.stages, config.layers)
    key = transport.ring_key.decode()
    places += [
        Assign(
            stage,
            config.stages,
            first,
            end,
            model.name,
            model.fingerprint,
            config.dtype,
            config.quantisation.name,
            context_length,
            blocks.port,
            key,
        )
        for stage, (first, end) in enumerate(split, start=1)
    ]
    pace = None if costs is None else lambda _: coordinator_pace(costs, draft)
    node = CoordinatorNode(
        transport,
        CoordinatorCompute(TorchHead(head), draft),
        machine,
        MembershipMachine(places, transport.data_port, config.timing),
        Equipment(transport, pace, trace),
    )
    return node, blocks
