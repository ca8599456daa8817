"""The processes that compute the gradients of each training step of the demo pair."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import torch
from demo_model import BASE_SHAPE, DRAFT_SHAPE, build_model, pair_losses, pair_parameters
from tokenizers import Tokenizer


def attach_gradients(parameters: list[torch.nn.Parameter], flat: torch.Tensor) -> None:
    """Let every parameter's gradient be its slice of one flat tensor."""
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.grad = flat[start:stop].view_as(parameter)
        start = stop


def work(
    args: argparse.Namespace,
    tokenizer_path: str,
    weights: list[torch.Tensor],
    gradients: torch.Tensor,
    tasks: Any,
    results: Any,
) -> None:
    """One worker process: take micro-batches as they come, add their gradients to its sum."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tokenizer = Tokenizer.from_file(tokenizer_path)
    base, draft = build_model(BASE_SHAPE, tokenizer), build_model(DRAFT_SHAPE, tokenizer)
    for model in (base, draft):
        model.set_attn_implementation("eager")  # compiled, faster than the CPU's flash attention
    parameters = pair_parameters(base, draft)
    for parameter, shared in zip(parameters, weights, strict=True):
        parameter.data = shared
    attach_gradients(parameters, gradients)
    losses = torch.compile(pair_losses, dynamic=False) if args.compile else pair_losses
    share = args.micro_tokens / args.batch_tokens
    while True:
        rows, with_draft = tasks.get()
        tokens = torch.from_numpy(rows)
        student = draft if with_draft else None
        base_loss, draft_loss, agreement = losses(base, student, tokens, args.truth_share)
        ((base_loss + draft_loss) * share).backward()
        results.put((base_loss.item(), draft_loss.item(), agreement.item()))


class Workers:
    """Single-threaded processes that share the weights and the micro-batches of each step.

    Each takes the next micro-batch when it is free, so a core busy with other work slows the run
    by its own share only; threads that march in step would all wait for the slowest.
    """

    def __init__(
        self, args: argparse.Namespace, tokenizer_path: Path, parameters: list[torch.nn.Parameter]
    ) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.tasks, self.results = context.SimpleQueue(), context.SimpleQueue()
        weights = [parameter.data.share_memory_() for parameter in parameters]
        size = sum(parameter.numel() for parameter in parameters)
        self.total = torch.zeros(size)
        attach_gradients(parameters, self.total)
        self.gradients = [torch.zeros(size).share_memory_() for _ in range(args.threads)]
        self.processes = [
            context.Process(
                target=work,
                args=(args, str(tokenizer_path), weights, own, self.tasks, self.results),
                daemon=True,
            )
            for own in self.gradients
        ]
        for process in self.processes:
            process.start()

    def gather(self, micro_batches: list[torch.Tensor], with_draft: bool) -> torch.Tensor:
        """Leave the step's gradients in the parameters; return its mean losses and agreement."""
        for tokens in micro_batches:
            self.tasks.put((tokens.numpy(), with_draft))
        measured = torch.tensor([self.results.get() for _ in micro_batches])
        self.total.zero_()
        for own in self.gradients:
            self.total += own
            own.zero_()
        return measured.mean(0)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
