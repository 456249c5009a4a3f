"""The named values that cross rooms. Imports nothing but the standard library."""

from tandem.types.batch import Batch, TrainSequence
from tandem.types.errors import CollectiveError, DamagedOffload, DamagedWeights, EndlessTemplate, EngineDied, RunError, UserError
from tandem.types.prompt import Prompt
from tandem.types.replay_buffer import ReplayBuffer
from tandem.types.round import Round
from tandem.types.routed_experts import RoutedExperts
from tandem.types.sample import FinishReason, Sample, WeightVersion
from tandem.types.score import Score, ScoreState
from tandem.types.weights import PartEntry, TensorEntry, Updated, WeightManifest, WeightSource

__all__ = [
    "Batch",
    "CollectiveError",
    "DamagedOffload",
    "DamagedWeights",
    "EndlessTemplate",
    "EngineDied",
    "FinishReason",
    "PartEntry",
    "Prompt",
    "ReplayBuffer",
    "RoutedExperts",
    "Round",
    "RunError",
    "Sample",
    "Score",
    "ScoreState",
    "TensorEntry",
    "TrainSequence",
    "Updated",
    "UserError",
    "WeightManifest",
    "WeightSource",
    "WeightVersion",
]
