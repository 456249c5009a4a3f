"""Creates the proposer of an engine, checked against its model."""

from collections.abc import Iterable

from torch import Tensor

from tandem.config.engine import HEAD_METHODS, SpeculativeConfig
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.draft_model import DraftModel
from tandem.engine.spec_decode.eagle3_draft import Eagle3Draft
from tandem.engine.spec_decode.ngram_proposer import NgramProposer
from tandem.engine.spec_decode.speculative import Proposer
from tandem.engine.spec_decode.state_proposer import DraftHead, StateProposer
from tandem.engine.spec_decode.step_costs import StepCosts
from tandem.engine.spec_decode.suffix_proposer import SuffixProposer
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors
from tandem.types import UserError


def make_proposer(
    speculative: SpeculativeConfig | None, draft: Decoder | DraftHead | None, shapes: ModelShapes, settings: EngineSettings, batch: InputBatch,
    step_costs: StepCosts | None = None,
) -> Proposer | None:
    """Returns the proposer of ``speculative`` for a model of ``shapes`` and the sequences in ``batch``; packs ``draft``. ``step_costs``: as in
    ``SuffixProposer``. Raises ``UserError`` if the draft model does not fit the model."""
    if isinstance(draft, Decoder) != (speculative is not None and speculative.method == "draft"):
        raise UserError("a draft model and speculative method 'draft' belong together; give both or neither")
    if speculative is None:
        return None
    if speculative.method in HEAD_METHODS:
        if draft is None or isinstance(draft, Decoder):
            raise UserError(f"speculative method '{speculative.method}' needs its draft head; give it as the draft")
        draft.use_context(settings.max_model_len)
        most_rows = speculative.batch_limit(batch.on_device.device.type, settings.max_num_seqs)
        return StateProposer(draft, batch, settings.num_blocks, most_rows)
    if speculative.method == "suffix":
        return SuffixProposer(batch, speculative, step_costs)
    if not isinstance(draft, Decoder):
        return NgramProposer(batch, speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    if draft.shapes.vocab_size != shapes.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.shapes.vocab_size} tokens and the model of {shapes.vocab_size}; "
            "choose a draft model of the same family"
        )
    if draft.shapes.linear_attention is not None:
        raise UserError(f"the draft model is a {draft.shapes.architecture} with layers of linear attention, which are not kept for drafts; choose another one")
    if draft.shapes.max_position_embeddings < settings.max_model_len:
        raise UserError(
            f"the draft model has {draft.shapes.max_position_embeddings} positions and max_model_len is {settings.max_model_len}; "
            "lower max_model_len or choose another draft model"
        )
    draft.use_context(settings.max_model_len)
    if not draft.is_packed:
        draft.pack()
    return DraftModel(draft, settings.num_blocks, batch)


def eagle3_of(proposer: Proposer | None) -> Eagle3Draft | None:
    """Returns the EAGLE-3 head of ``proposer``, if that is what it drafts with."""
    return proposer.head if isinstance(proposer, StateProposer) and isinstance(proposer.head, Eagle3Draft) else None


def new_draft(proposer: Proposer | None, tensors: Iterable[tuple[str, Tensor]]) -> Decoder | Eagle3Draft:
    """Returns a new packed draft model, or EAGLE-3 head, with the weights ``tensors``. Raises ``UserError`` if the engine has none or they do not fit it."""
    if (head := eagle3_of(proposer)) is not None:
        return head.with_weights(dict(tensors))
    if not isinstance(proposer, DraftModel):
        raise UserError("draft_tensors are given and this engine has no draft model; leave them out or use speculative method 'draft' or 'eagle3'")
    old = proposer.decoder
    new = Decoder(old.shapes, old.kernels, dtype=old.embed_tokens.dtype, device=old.embed_tokens.device)
    new.quantization = old.quantization
    new.use_context(old.positions)
    load_tensors(new, tensors, pack=True)
    return new


def put_draft(proposer: Proposer | None, draft: Decoder | Eagle3Draft) -> None:
    """Lets ``proposer`` draft with ``draft``, which ``new_draft`` made for it."""
    if isinstance(proposer, DraftModel) and isinstance(draft, Decoder):
        proposer.decoder = draft
    elif isinstance(proposer, StateProposer) and isinstance(draft, Eagle3Draft):
        proposer.head = draft
