"""PipeDec policy: one layer of a dynamic prediction tree enters the pipeline every timestep.

PipeDec (see docs/policies.md). §3.3: the tree grows by layers; of all children of the last layer
the `width` w with the highest cumulative probability are kept. §3.4: in a timestep the draft model
predicts the next layer while every stage computes one; at its end the last stage's result is
checked against the tree's second layer and everybody prunes (one level is verified a step), then
everything moves on. A miss clears the tree: it starts again at the new token (§3.3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.policy.base import Decision, Expand, Send, View


@dataclass(frozen=True, slots=True)
class PipeDec:
    """`width` w = 32 nodes a layer and `children` c = 16 candidates a node, as set in §4.3.1."""

    width: int = 32
    children: int = 16
    name: str = "pipedec"
    drafts: bool = True
    verifies_each_result: bool = True
    calibrates: bool = False
    drafts_in_step: bool = True

    def window(self, stages: int) -> int:
        """One layer on every stage (§3.1: as many parallel groups as the tree is deep)."""
        return stages

    def decide(self, view: View) -> list[Decision]:
        """A timestep: the next layer enters, and the one behind it is predicted meanwhile."""
        tree = view.tree
        layer = tree.deepest()
        decisions: list[Decision] = []
        ready = not view.drafting and not view.verifying and not view.queued
        if not tree[tree.root].sent:
            decisions.append(Send((tree.root,)))
        elif ready and view.in_flight < self.window(view.stages) and not tree[layer[0]].sent:
            decisions.append(Send(layer))
        sent = tree[layer[0]].sent or bool(decisions)
        room = tree[layer[0]].position - tree[tree.root].position < view.depth_left
        if sent and not view.drafting and room and not all(tree[i].expanded for i in layer):
            decisions.append(Expand(layer, self.children, self.width))
        return decisions
