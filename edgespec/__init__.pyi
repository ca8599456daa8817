"""The names of edgespec/__init__.py, for type checkers."""

from edgespec.door.asking import Completion as Completion
from edgespec.door.asking import SamplingParams as SamplingParams
from edgespec.door.llm import LLM as LLM
from edgespec.door.llm import AsyncClient as AsyncClient
from edgespec.door.llm import Client as Client
from edgespec.door.simulation import simulate as simulate
from edgespec.drafting.own import DraftSource as DraftSource
from edgespec.policy.base import Decision as Decision
from edgespec.policy.base import Deepen as Deepen
from edgespec.policy.base import Expand as Expand
from edgespec.policy.base import Grow as Grow
from edgespec.policy.base import Policy as Policy
from edgespec.policy.base import RequestView as RequestView
from edgespec.policy.base import Send as Send
from edgespec.verify.sampling import Sampling as Sampling

__version__: str
