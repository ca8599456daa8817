"""PipeDec policy: one layer of a dynamic prediction tree enters the pipeline every timestep.

PipeDec (see docs/policies.md). §3.3: the tree grows by layers; of all children of the last layer
the `width` w with the highest cumulative probability are kept. §3.4: in a timestep the draft model
predicts the next layer while every stage computes one; at its end the last stage's result is
checked against the tree's second layer and all nodes prune (one level is verified a step), then
everything moves on. A miss clears the tree: it starts again at the new token (§3.3.4).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.policy.base import Decision, Expand, Policy, RequestView, Results, Send


@dataclass(frozen=True, slots=True)
class PipeDec(Policy):
    """`width` w = 32 nodes a layer and `children` c = 16 candidates a node, as set in §4.3.1.

    FlowSpec's comparison runs it with 16 a layer (its appendix A.1): policy `pipedec16`.
    """

    width: int = 32
    children: int = 16
    name: str = "pipedec"
    results = Results.IN_STEP
    waits_for_credit = True

    def window(self, stages: int) -> int:
        """One layer on every stage (§3.1: as many parallel groups as the tree is deep); a root
        that a miss made enters after what the miss made worthless."""
        return stages + 1

    def decide(self, view: RequestView) -> list[Decision]:
        """A timestep: the next layer enters, and the one after it is predicted meanwhile."""
        tree = view.tree
        if not tree.is_sent(tree.root):
            return [Send((tree.root,))]
        layer = tree.level(tree.lowest)
        is_new = not tree.is_sent(layer[0])
        if is_new and (view.queued or view.verifying or view.in_flight >= view.stages):
            return []  # the step that is under way has to end first, everywhere
        decisions: list[Decision] = [Send(layer)] if is_new else []
        below = tree.lowest - tree.position(tree.root)
        if not view.drafting and below < view.depth_left and not tree.is_expanded(layer[0]):
            decisions.append(Expand(layer, self.children, self.width))
        return decisions
