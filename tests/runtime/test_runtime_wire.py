import contextlib
import dataclasses
import math
import random
import struct

import pytest

from tandem.types import FinishReason, Prompt, RoutedExperts, Sample, Score, ScoreState, WeightVersion, wire, wire_records

AWKWARD_FLOATS = (0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, -math.inf, math.inf, 2**-149)


def bits(values):
    return [struct.pack("<d", value) for value in values]


def sample(i: int, n: int, seed: int = 0) -> Sample:
    draw = random.Random(1000 * seed + i)
    return Sample(
        id=f"7/sort:{i}/0",
        prompt_id=f"sort:{i}",
        index=i,
        prompt_token_ids=tuple(draw.randrange(2**31) for _ in range(i)),
        token_ids=tuple(draw.randrange(151_000) for _ in range(n)),
        logprobs=tuple(draw.choice((-draw.random() * 30, *AWKWARD_FLOATS)) for _ in range(n)),
        sampling_logprobs=tuple(-draw.random() for _ in range(n)),
        weight_versions=tuple(WeightVersion(2, draw.randrange(9)) for _ in range(n)),
        finish_reason=draw.choice(list(FinishReason)),
        text="héllo \N{SNOWMAN} \ud800 \x00",
    )


def test_samples_come_back_with_the_bits_they_had():
    samples = [sample(i, n) for i, n in enumerate((5, 0, 1, 33))]
    back = wire_records.decode_samples(wire_records.encode_samples(samples))
    assert back == samples
    for old, new in zip(samples, back, strict=True):
        assert bits(old.logprobs) == bits(new.logprobs)
        assert type(new.weight_versions) is tuple and all(type(v) is WeightVersion for v in new.weight_versions)
        assert type(new.finish_reason) is FinishReason


def test_the_same_samples_have_the_same_bytes():
    assert wire_records.encode_samples([sample(3, 9)]) == wire_records.encode_samples([sample(3, 9)])


def episode(i: int) -> Sample:
    """A sample whose second and third tokens are an observation."""
    whole = sample(i, 5)
    at = whole.weight_versions
    return dataclasses.replace(whole, weight_versions=(at[0], None, None, *at[3:]), response_mask=(True, False, False, True, True))


def test_the_response_mask_of_an_episode_comes_back_and_costs_other_samples_nothing():
    plain, episodes = [sample(1, 3), sample(2, 4)], [episode(0), sample(1, 3), episode(2)]
    assert wire_records.decode_samples(wire_records.encode_samples(episodes)) == episodes
    assert b"response_mask" not in wire_records.encode_samples(plain)
    assert episodes[0].sampled_tokens == 3 and plain[0].sampled_tokens == 3
    assert episodes[0].sampled_weight_versions == [version for version in episodes[0].weight_versions if version]


def test_a_response_mask_that_the_other_fields_contradict_is_refused():
    for broken in (dataclasses.replace(episode(0), response_mask=()), dataclasses.replace(sample(0, 2), response_mask=(True, False))):
        with pytest.raises(ValueError, match="disagree on which tokens were sampled"):
            wire_records.encode_samples([broken])
    with pytest.raises(ValueError, match="response_mask has 2 entries for 5 tokens"):
        wire_records.encode_samples([dataclasses.replace(episode(0), response_mask=(True, False))])


def routed(whole: Sample, item_bytes: int = 1) -> Sample:
    """``whole`` with a routing of 3 layers and 2 experts for each token but the last."""
    size = (len(whole.prompt_token_ids) + len(whole.token_ids) - 1) * 3 * 2 * item_bytes
    return dataclasses.replace(whole, routed_experts=RoutedExperts(3, 2, item_bytes, random.Random(whole.id).randbytes(size)))


@pytest.mark.parametrize("item_bytes", [1, 2])
def test_the_routing_of_samples_comes_back_and_costs_other_samples_nothing(item_bytes):
    samples = [routed(sample(1, 3), item_bytes), sample(2, 4), routed(sample(3, 7), item_bytes)]
    assert wire_records.decode_samples(wire_records.encode_samples(samples)) == samples
    assert b"routed_experts" not in wire_records.encode_samples(samples[1:2])


def test_a_routing_of_other_tokens_or_of_two_models_is_refused():
    short = dataclasses.replace(routed(sample(1, 3)), token_ids=(1, 2), logprobs=(0.0,) * 2, sampling_logprobs=(0.0,) * 2)
    short = dataclasses.replace(short, weight_versions=(WeightVersion(0, 0),) * 2)
    with pytest.raises(ValueError, match="routed_experts has 3 entries for 2 tokens"):
        wire_records.encode_samples([short])
    with pytest.raises(ValueError, match="the routings of 2 models"):
        wire_records.encode_samples([routed(sample(1, 3)), routed(sample(2, 3), 2)])


def test_scores_of_every_state_come_back():
    scores = [
        Score("a", ScoreState.NUMBER, 0.1, {"match": 1.0, "format": -0.0}, True, "right"),
        Score("b", ScoreState.MODEL_FAULT, 0.0, {}, False),
        Score("c", ScoreState.INFRASTRUCTURE_FAULT, None, {"judge": math.inf}, None, "the judge hung"),
        Score("d", ScoreState.NUMBER, 5e-324),
    ]
    back = wire_records.decode_scores(wire_records.encode_scores(scores))
    assert back == scores
    assert [list(score.components) for score in back] == [list(score.components) for score in scores]
    assert math.copysign(1, back[0].components["format"]) == -1


def test_prompts_come_back_with_their_json_values():
    prompts = [Prompt("p", "text", (1, 2), {"answer": [1, 2.5, None]}, "sort", {"n": 3}), Prompt("q", "", (), None)]
    assert wire_records.decode_prompts(wire_records.encode_prompts(prompts)) == prompts


def test_a_prompt_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="not JSON"):
        wire_records.encode_prompts([Prompt("p", "text", (1,), object())])


@pytest.mark.parametrize("field", ["logprobs", "sampling_logprobs", "weight_versions"])
def test_a_sample_with_a_missing_token_value_is_refused(field):
    broken = dataclasses.replace(sample(1, 4), **{field: getattr(sample(1, 4), field)[:-1]})
    with pytest.raises(ValueError, match=f"{field} has 3 entries for 4 tokens"):
        wire_records.encode_samples([broken])


def test_every_truncation_is_refused():
    data = wire_records.encode_samples([sample(1, 3), sample(0, 3), routed(sample(2, 3))])
    for length in range(len(data)):
        with pytest.raises(ValueError):
            wire_records.decode_samples(data[:length])


def test_a_flipped_byte_never_raises_anything_but_value_error():
    data = wire_records.encode_samples([sample(1, 3), sample(0, 3), routed(sample(2, 3))])
    draw = random.Random(1)
    for _ in range(2000):
        at, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        broken = bytearray(data)
        broken[at] ^= bit
        with contextlib.suppress(ValueError):
            wire_records.decode_samples(bytes(broken))


def test_sizes_that_lie_are_refused_before_anything_is_allocated():
    with pytest.raises(ValueError, match="allowed"):
        wire.decode(wire.PREFIX.pack(wire.MAGIC, 2**32 - 1, 2**63) + b"x" * 100)
    with pytest.raises(ValueError, match="not a frame"):
        wire.decode(b"PK\x03\x04" + b"\0" * 100)


def test_one_kind_of_frame_is_not_taken_for_another():
    with pytest.raises(ValueError, match="expected scores, found a frame of 'samples'"):
        wire_records.decode_scores(wire_records.encode_samples([]))


def test_a_frame_carries_bytes_as_they_are():
    blobs = {"a": bytes(range(256)), "b": b"", "c": b"\n" * 3}
    frame = wire.decode(wire.encode({"x": [1, 0.1]}, blobs, "call"))
    assert (frame.kind, frame.meta, dict(frame.blobs)) == ("call", {"x": [1, 0.1]}, blobs)


def test_a_token_beyond_int32_is_refused_not_wrapped():
    with pytest.raises(ValueError, match="does not fit"):
        wire_records.encode_prompts([Prompt("p", "", (2**31,))])
