"""Episodes of black-box agents: what was sampled is read again by its ids, an agent that rewrites its history forks, and faults mask their sample alone."""

import contextlib
import itertools
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.agent import AgentConfig
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.model import NewModelConfig
from tandem.config.multi_turn import MultiTurnConfig
from tandem.config.recipe import load_config
from tandem.config.rewards import FormatCheckerConfig, RewardFunctionConfig, RewardsConfig
from tandem.config.rollout import RolloutConfig
from tandem.engine.llm import LLM
from tandem.engine.processing.outputs import CompletionOutput
from tandem.jobs.checks.check_answers import check_agent_columns
from tandem.jobs.checks.check_counts import check_workers
from tandem.model.create_model import create_model
from tandem.rl.agents.agent_pool import AgentPool
from tandem.rl.agents.check_agent import check_agent
from tandem.rl.agents.conversations import Conversations
from tandem.rl.agents.in_flight import Agents, InFlightAgents
from tandem.rl.agents.session import Session, SessionEnded, TooLong
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rollout.dispatch import sampling_settings
from tandem.types import FinishReason, Prompt, RoutedExperts, RunError, Sample, Score, ScoreState, UserError, WeightVersion
from tandem.types.wire_records import decode_samples, encode_samples

sys.path.insert(0, str(Path(__file__).parents[1] / "text"))
from template_tokenizers import HERE, make_tokenizer
from test_text_tool_turns import FAMILIES

AT = WeightVersion(1, 3)
SETTINGS = sampling_settings(RolloutConfig(max_tokens=4000), 2, 7)
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}}]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'


def conversations(folder, template="chatml"):
    _, ends = FAMILIES[template]
    make_tokenizer(folder, (HERE / f"{template}.jinja").read_text(), ends)
    return Conversations.open(folder, "hermes")


def session_of(known, index=0, **settings):
    return Session(known, 3, Prompt("p0", "?", (1, 2)), index, {**SETTINGS, **settings}, context=100_000)


def test_a_branchs_tokens_keep_the_experts_of_the_call_that_computed_them_first(tmp_path):
    known = conversations(tmp_path)
    session, asked = session_of(known), []

    def answer(messages, text):
        request = session.ask(messages)
        ids = [*known.tokenizer.encode(text), next(iter(known.turns.ends))]
        routed = RoutedExperts(1, 1, 1, bytes([len(asked)]) * (len(request.prompt) + len(ids) - 1))
        asked.append(len(request.prompt) + len(ids) - 1)
        logprobs = [-0.5] * len(ids)
        return session.record(request, CompletionOutput(0, text, ids, logprobs, logprobs, [AT] * len(ids), "stop", routed_experts=routed)).answer

    messages = [{"role": "user", "content": "one"}]
    messages += [answer(messages, "first"), {"role": "user", "content": "more"}]
    answer(messages, "second")
    answer([{"role": "user", "content": "another"}], "third")
    sample = session.sample(None, "")
    forked, whole = sample, sample.branches[0]
    assert forked.routed_experts.data == b"\2" * asked[2]
    assert whole.routed_experts.data == bytes(asked[0]) + b"\1" * (asked[1] - asked[0])
    (again,) = decode_samples(encode_samples([sample]))
    assert (again.routed_experts, again.branches[0].routed_experts) == (forked.routed_experts, whole.routed_experts)


def answered(session, messages, ids, tools=(), reason="stop"):
    """Returns the call of ``session`` that the model answers with ``ids``."""
    asked = session.ask(messages, tools)
    text = session._conversations.tokenizer.decode(ids)
    logprobs = [-0.1 * (i + 1) for i in range(len(ids))]
    return session.record(asked, CompletionOutput(0, text, ids, logprobs, [2 * value for value in logprobs], [AT] * len(ids), reason))


def written(call):
    """Returns the answer of ``call`` as the SDK sends it back: arguments as text, and fields that nobody reads."""
    message = {**call.answer, "refusal": None, "audio": None}
    if "tool_calls" in message:
        function = lambda each: {"name": each["function"]["name"], "arguments": json.dumps(each["function"]["arguments"])}
        message["tool_calls"] = [{**each, "function": function(each)} for each in message["tool_calls"]]
    return message


def noise(known, draw, count=12):
    """Returns any ids in any order: encoding their text again would give others."""
    size, ends = known.tokenizer.vocab_size, known.turns.ends
    return [token for token in (draw.randrange(size) for _ in range(count)) if token not in ends]


@pytest.mark.parametrize(("template", "shows"), [("silent", False), ("chatml", True)])
def test_tools_of_an_agent_that_the_template_does_not_show_are_told_of_before_the_run_and_refused_before_a_token_is_sampled(template, shows, tmp_path):
    known = conversations(tmp_path, template)
    messages, refused = [{"role": "user", "content": "question"}], r"writes the same text with the tool and without, so that the model does not see them; put a"
    for ask in (session_of(known).ask, session_of(known).count):
        ask(messages, [])
        with contextlib.nullcontext() if shows else pytest.raises(UserError, match=refused):
            ask(messages, TOOLS)
    (tmp_path / "agents.py").write_text("def agent(prompt):\n    return 1.0\n")
    _, warnings = check_agent(AgentConfig(function=f"{tmp_path / 'agents.py'}:agent"), tmp_path)
    assert all(warning.startswith("warning: the chat template of '") for warning in warnings)
    said = "writes the same text with the tool and without, so that the model does not see them; a request of the agent that has tools is refused"
    assert [warning.partition("' ")[2] for warning in warnings] == ([] if shows else [said])


@pytest.mark.parametrize("template", FAMILIES)
def test_tokens_that_were_sampled_are_never_encoded_again(template, tmp_path):
    known, draw = conversations(tmp_path, template), random.Random(1)
    session, end = session_of(known), next(iter(known.turns.ends))
    messages, calls = [{"role": "user", "content": "question"}], []
    for turn in range(4):
        calls.append(answered(session, messages, [*noise(known, draw), end]))
        messages = [*messages, written(calls[-1]), {"role": "user", "content": [{"type": "text", "text": f"and then {turn}?"}]}]
    sample = session.sample("done", "")
    assert sample.branches == () and sample.text == "done" and sample.finish_reason is FinishReason.STOP and sample.id == "3/p0/0"
    own = [token for token, is_own in zip(sample.token_ids, sample.is_sampled, strict=True) if is_own]
    assert own == [token for call in calls for token in call.token_ids]
    assert [call.parent for call in calls] == [None, *calls[:-1]]
    for call, earlier in itertools.pairwise(reversed(calls)):
        assert list(call.prompt[: len(earlier.read)]) == earlier.read
    # What stands between is what the template writes there.
    between = known.tokenizer.decode(calls[1].prompt[len(calls[0].read) :], skip_special_tokens=False)
    assert "and then 0?" in between
    for is_own, logprob, other, version in zip(sample.is_sampled, sample.logprobs, sample.sampling_logprobs, sample.weight_versions, strict=True):
        assert (logprob < 0 and other == 2 * logprob and version == AT) if is_own else (logprob == other == 0.0 and version is None)


def test_a_conversation_that_was_sampled_as_the_tokenizer_encodes_it_has_the_tokens_of_the_whole_template(tmp_path):
    known = conversations(tmp_path)
    session, end = session_of(known), next(iter(known.turns.ends))
    first = [{"role": "system", "content": "short"}, {"role": "user", "content": "question"}]
    one = answered(session, first, [*known.tokenizer.encode(CALL % "1+2"), end], TOOLS)
    assert [call.name for call in one.tool_calls] == ["calculator"] and one.answer["tool_calls"][0]["function"]["arguments"] == {"expression": "1+2"}
    second = [*first, written(one), {"role": "tool", "tool_call_id": one.tool_calls[0].id, "content": "3"}]
    two = answered(session, second, [*known.tokenizer.encode("it is 3"), end], TOOLS)
    # The template writes line breaks around a call, which the model has not sampled.
    plain = [*first, one.answer, {"role": "tool", "tool_call_id": one.tool_calls[0].id, "content": "3"}]
    call = CALL % "1+2"
    whole = known.templates[1].render(plain, tools=TOOLS).replace(call.replace("l>{", "l>\n{").replace("}<", "}\n<"), call)
    assert known.tokenizer.decode(list(two.prompt), skip_special_tokens=False) == whole
    assert session.sample(None, "").sampled_tokens == len(one.token_ids) + len(two.token_ids)


def test_a_rewritten_history_forks_and_every_sampled_token_counts_once(tmp_path):
    known, draw = conversations(tmp_path), random.Random(2)
    session, end = session_of(known), next(iter(known.turns.ends))
    question = [{"role": "user", "content": "question"}]
    one = answered(session, question, [*noise(known, draw), end])
    two = answered(session, [*question, written(one), {"role": "user", "content": "more"}], [*noise(known, draw), end])
    # It goes back to the first answer, and later summarizes everything.
    three = answered(session, [*question, written(one), {"role": "user", "content": "other"}], [*noise(known, draw), end])
    four = answered(session, [{"role": "user", "content": "summary"}], [*noise(known, draw), end])
    assert (two.parent, three.parent, four.parent) == (one, one, None)
    sample = session.sample(None, "")
    assert sample.token_ids == tuple(four.token_ids) and sample.prompt_token_ids == tuple(four.prompt) and sample.text == four.text
    assert [each.id for each in sample.sequences] == ["3/p0/0", "3/p0/0/1", "3/p0/0/2"]
    sampled = [tuple(token for token, own in zip(each.token_ids, each.is_sampled, strict=True) if own) for each in sample.sequences]
    heir, other = sorted([two, three], key=lambda call: list(call.prompt))
    assert sorted(sampled) == sorted([tuple(four.token_ids), (*one.token_ids, *heir.token_ids), tuple(other.token_ids)])
    assert sum(each.sampled_tokens for each in sample.sequences) == sum(len(call.token_ids) for call in (one, two, three, four))
    forked = next(each for each in sample.branches if tuple(other.token_ids) == each.token_ids)
    assert forked.prompt_token_ids == tuple(other.prompt) and list(other.prompt[: len(one.read)]) == one.read
    assert decode_samples(encode_samples([sample, replace(sample, id="3/p0/1", branches=())])) == [sample, replace(sample, id="3/p0/1", branches=())]


def test_branches_do_not_depend_on_the_order_in_which_calls_are_made_at_once(tmp_path):
    known, drawn = conversations(tmp_path), {}
    end = next(iter(known.turns.ends))
    question = [{"role": "user", "content": "question"}]
    seen = set()
    for order in itertools.permutations("abc"):
        session, draw = session_of(known), random.Random(3)
        one = answered(session, question, [*noise(known, draw), end])
        for name in order:
            asked = session.ask([*question, written(one), {"role": "user", "content": name}])
            assert drawn.setdefault(name, asked.key) == asked.key
            ids = [*known.tokenizer.encode(name * 3), end]
            session.record(asked, CompletionOutput(0, name, ids, [-1.0] * len(ids), [-1.0] * len(ids), [AT] * len(ids), "stop"))
        last = session.ask([{"role": "user", "content": "all"}])
        session.record(last, CompletionOutput(0, "x", [end], [-1.0], [-1.0], [AT], "stop"))
        sample = session.sample(None, "")
        seen.add(tuple((each.prompt_token_ids, each.token_ids) for each in sample.sequences))
    assert len(seen) == 1 and len(set(drawn.values())) == 3


def test_equal_requests_of_an_episode_have_other_random_numbers_and_those_of_another_episode_the_same(tmp_path):
    known = conversations(tmp_path)
    question = [{"role": "user", "content": "question"}]
    first, again = session_of(known), session_of(known)
    keys = [first.ask(question).key, first.ask(question).key]
    assert keys[0] != keys[1] and keys == [again.ask(question).key, again.ask(question).key]
    # A client that left asks again, and gets what it would have got.
    third = session_of(known)
    third.forget(third.ask(question))
    assert third.ask(question).key == keys[0]


def test_a_branch_has_the_advantage_of_its_episode_and_a_group_counts_episodes():
    def sample(index, tokens, branches=()):
        n = len(tokens)
        return Sample(f"0/p/{index}", "p", index, (1,), tokens, (-1.0,) * n, (-1.0,) * n, (WeightVersion(0, 0),) * n, FinishReason.STOP, "", branches=branches)

    branch = replace(sample(0, (7, 8)), id="0/p/0/1", prompt_token_ids=(1, 2, 3))
    samples = [sample(0, (4, 5, 6), (branch,)), sample(1, (4,)), sample(2, (5, 5))]
    scores = [Score(each.id, ScoreState.NUMBER, value) for each, value in zip(samples, (1.0, 0.0, 0.0), strict=True)]
    batch = make_batch(0, samples, scores, AlgorithmConfig(name="dr_grpo"), 16)
    advantages = {one.id: {a for a, m in zip(one.advantages, one.loss_mask, strict=True) if m} for one in batch.sequences}
    # Three episodes: the mean is 1/3, not 2/4.
    assert advantages == {"0/p/0": {1 - 1 / 3}, "0/p/0/1": {1 - 1 / 3}, "0/p/1": {-1 / 3}, "0/p/2": {-1 / 3}}
    assert [sum(one.loss_mask) for one in batch.sequences] == [3, 2, 1, 2]
    assert [one.prompt_length for one in batch.sequences] == [1, 3, 1, 1]


def test_a_request_without_room_is_refused_and_an_episode_that_fails_by_it_is_truncated(tmp_path):
    known = conversations(tmp_path)
    session, end = session_of(known, max_tokens=30), next(iter(known.turns.ends))
    question = [{"role": "user", "content": "question"}]
    one = answered(session, question, [*known.tokenizer.encode("a" * 5), end])
    assert session.ask(question, max_tokens=4).params.max_tokens == 4 and session.ask(question).params.max_tokens == 30
    longer = [*question, written(one), {"role": "user", "content": "abc defg " * 30}]
    with pytest.raises(TooLong, match=r"rollout\.max_tokens is 30"):
        session.ask(longer)
    sample = session.sample(None, "agent 'a:b': BadRequestError: no room")
    assert sample.finish_reason is FinishReason.LENGTH and sample.fault == "" and sample.token_ids == tuple(one.token_ids)
    session.close()
    with pytest.raises(SessionEnded):
        session.ask(question)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.agent.function=answer", r"'rollout\.agent\.function' is 'answer'; it must be of the form module:function"),
        ("rollout.agent.workers=0", r"rollout\.agent\.workers"),
        ("rollout.agent.timeout_s=0", r"rollout\.agent\.timeout_s"),
        ("machine.call_deadline_s=600", r"'rollout\.agent\.timeout_s' is 600 and machine\.call_deadline_s 600"),
        ("rollout.multi_turn.max_turns=2", r"an agent runs its tools itself"),
        ("rollout.budget_tokens=8", r"'rollout\.budget_tokens' with rollout\.agent"),
        ("algorithm.name=online_dpo", r"'rollout\.agent' with algorithm\.name online_dpo"),
        ("reward_model.path=models/reward", r"'rollout\.agent' with section 'reward_model'"),
        ("rollout.agent=null task.tools=[]", r"reward function 'agent' is the number that an agent returned, and section 'rollout\.agent' is not given"),
    ],
)
def test_what_an_agent_cannot_be_combined_with_is_refused(override, message):
    with pytest.raises(UserError, match=message):
        load_config(Path(__file__).parents[1] / "pod" / "agent.yaml", ["rewards.functions=[{function: agent}]", *override.split()])


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (RolloutConfig(agent=AgentConfig("a:b", workers=9)), r"'rollout\.agent\.workers' is 9: as many processes need at least 0\.44 GiB .*to 8 or less"),
        (RolloutConfig(agent=AgentConfig("a:b", workers=5), workers=2), r"'rollout\.agent\.workers' is 5 for each of 2 rollout workers: .*to 4 or less"),
        (RolloutConfig(multi_turn=MultiTurnConfig(tool_workers=30)), r"'rollout\.multi_turn\.tool_workers' is 30: .*to 27 or less"),
    ],
)
def test_workers_that_do_not_fit_beside_the_pod_are_refused(rollout, message):
    fits = replace(rollout, agent=rollout.agent and replace(rollout.agent, workers=4), multi_turn=rollout.multi_turn and MultiTurnConfig(tool_workers=27))
    check_workers(RewardsConfig(), fits, available=600 << 20, beside=190 << 20)
    with pytest.raises(RunError, match=message):
        check_workers(RewardsConfig(), rollout, available=600 << 20, beside=190 << 20)


AGENT = '''
import asyncio, os, random, signal, sys, time
from openai import AsyncOpenAI, OpenAI, AuthenticationError, BadRequestError

client = OpenAI(max_retries=0)
runs = 0


def ask(messages, **options):
    return client.chat.completions.create(model="any", messages=messages, **options).choices[0].message


def plain(question):
    global runs
    runs += 1
    assert runs == 1, "an episode sees the state of another"
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        message = ask(messages, max_completion_tokens=8)
        messages += [message, {"role": "user", "content": "again"}]
    return f"{message.content}|{random.random()}"


def streamed(question):
    parts = client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}], stream=True, stream_options={"include_usage": True})
    chunks = list(parts)
    assert chunks[-1].usage.completion_tokens > 0
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def at_once(question):
    own = AsyncOpenAI()
    turns = [own.chat.completions.create(model="any", messages=[{"role": "user", "content": question + str(i)}]) for i in range(3)]
    return "|".join(sorted(str(each.choices[0].message.content) for each in await asyncio.gather(*turns)))


def bad(question):
    message = ask([{"role": "user", "content": question}])
    number = int(question)
    if number == 1:
        raise ValueError("a defect")
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 3:
        time.sleep(600)
    if number == 4:
        return ["a list"]
    if number == 5:
        sys.exit(3)
    return "fine"


def silent(question):
    return "without a request"


def rude(question):
    seen = []
    for options in ({"n": 2}, {"logprobs": True}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"}):
        try:
            ask([{"role": "user", "content": question}], **options)
        except BadRequestError as error:
            seen.append(error.body["message"].split()[0])
    try:
        OpenAI(api_key="wrong").chat.completions.create(model="any", messages=[{"role": "user", "content": "?"}])
    except AuthenticationError as error:
        seen.append(error.body["code"])
    ask([{"role": "user", "content": question}])
    return " ".join(seen)


def two(a, b, ground_truth):
    return a


def none(*, question):
    return question


def judges(question, level, messages, ground_truth, absent="nothing", **others):
    """Returns the numbers of its own judgement."""
    ask([{"role": "user", "content": question}])
    known = f"{level} {messages} {ground_truth} {absent} {sorted(others)}"
    return {"0": 0.25, "1": {"reward": 1, "text": known, "turns": 3}, "2": {"score": 1.0}, "3": True, "4": float("nan"), "5": {"reward": "1"}}[question]


def responds(question):
    create = lambda **options: client.responses.create(model="any", max_output_tokens=8, **options)
    one = create(input=question, instructions="short")
    two = create(input="more", previous_response_id=one.id)
    items = [{"role": "user", "content": question}, *one.output, {"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    three = create(input=[{"role": "system", "content": "short"}, *items, *two.output[1:]])
    with client.responses.stream(model="any", input="last", max_output_tokens=8) as stream:
        events = list(stream)
    kinds, final = [event.type for event in events], events[-1].response
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds and final.usage.output_tokens > 0
    return "|".join([one.output_text, two.output_text, three.output_text, final.output_text])


def completes(question):
    create = lambda prompt, **options: client.completions.create(model="any", prompt=prompt, max_tokens=8, **options)
    text = create(question).choices[0].text
    both = create(question + text + " and so ")
    chunks = [chunk.choices[0].text for chunk in create("stream", stream=True)]
    ids = create([40, 41, 42]).choices[0].text
    return "|".join([text, both.choices[0].text, "".join(chunks), ids])


def messages(question):
    """Speaks Anthropic's protocol as its reference describes it."""
    import httpx, json
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "anthropic-version": "2023-06-01"}
    at, common = os.environ["ANTHROPIC_BASE_URL"], {"model": "claude", "max_tokens": 8}
    post = lambda path, body: httpx.post(at + path, json={**common, **body}, headers=headers, timeout=60)
    asked = [{"role": "user", "content": question}]
    one = post("/v1/messages", {"messages": asked, "system": "short"}).json()
    assert (one["type"], one["role"], one["stop_reason"] in ("max_tokens", "end_turn")) == ("message", "assistant", True), one
    more = [*asked, {"role": "assistant", "content": one["content"]}, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    counted = post("/v1/messages/count_tokens", {"messages": more, "system": [{"type": "text", "text": "short"}]}).json()
    lines = post("/v1/messages", {"messages": more, "system": "short", "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == ["message_start", *block, "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["input_tokens"] == counted["input_tokens"]
    wrong = post("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert wrong.status_code == 400 and wrong.json()["type"] == "error" and "'image'" in wrong.json()["error"]["message"], wrong.text
    return one["content"][0]["text"] + "|" + events[2]["delta"]["text"]
'''


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    create_model(NewModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=32,
                                max_position_embeddings=256, chat=True, characters="ascii"), 1, folder)  # fmt: skip
    return LLM(str(folder)), folder


@pytest.fixture
def drawn(llm, tmp_path, monkeypatch):
    engine, folder = llm
    (tmp_path / "agents.py").write_text(AGENT)
    opened = []

    def run(name, questions=("why",), count=2, columns=None, **config):
        settings = {"workers": 3, **config}
        agents = Agents(AgentConfig(function=f"{tmp_path / 'agents.py'}:{name}", **settings), folder, tmp_path / "logs")
        opened.append(agents)
        episodes = InFlightAgents(engine.engine, agents, 256)
        prompts = [Prompt(f"p{i}", text, (1,), "truth", columns=columns or {}, question=text) for i, text in enumerate(questions)]
        episodes.add(0, prompts, {**SETTINGS, "n": count, "max_tokens": 60})
        streamed = []
        samples = episodes.draw("all", lambda done, total: None, streamed.extend)
        assert sorted(streamed, key=lambda each: (each.prompt_id, each.index)) == samples and not engine.engine.has_unfinished_requests
        return samples

    yield run
    for agents in opened:
        agents.close()


@pytest.mark.full
def test_an_agent_of_the_openai_sdk_has_the_same_samples_whatever_runs_beside_it(drawn):
    samples = drawn("plain", ("why", "how"), workers=3)
    assert [sample.id for sample in samples] == ["0/p0/0", "0/p0/1", "0/p1/0", "0/p1/1"]
    assert all(not sample.fault and not sample.branches and [m["role"] for m in sample.messages] == ["assistant", "user", "assistant"] for sample in samples)
    assert len({sample.token_ids for sample in samples}) == 4 and len({sample.text for sample in samples}) == 4
    assert drawn("plain", ("why", "how"), workers=1) == samples


@pytest.mark.full
def test_an_answer_can_be_streamed_and_requests_can_be_made_at_once(drawn):
    for sample in drawn("streamed"):
        assert not sample.fault and sample.text == sample.messages[-1]["content"]
    first = drawn("at_once")
    assert all(len(sample.sequences) == 3 and not sample.fault for sample in first)
    assert {each.token_ids for each in first[0].sequences} == {each.token_ids for each in drawn("at_once", workers=1)[0].sequences}


def texts(sample):
    return [message["content"] for message in sample.messages if message["role"] == "assistant"]


@pytest.mark.full
def test_responses_continue_each_other_by_their_ids_and_as_items(drawn):
    for sample in drawn("responds"):
        assert not sample.fault, sample.fault
        one, two, three, last = sample.text.split("|")
        # Without their instructions the second begins anew; the third is what the first was continued with.
        assert len(sample.sequences) == 3 and texts(sample) == [last]
        assert sorted(map(texts, sample.branches)) == sorted([[one, three], [two]])


@pytest.mark.full
def test_completions_continue_a_text_or_token_ids(drawn):
    for sample in drawn("completes"):
        assert not sample.fault, sample.fault
        one, two, streamed, ids = sample.text.split("|")
        assert texts(sample) == [ids] and sample.prompt_token_ids == (40, 41, 42)
        assert sorted(map(texts, sample.branches)) in (sorted([[one, two], [streamed]]), sorted([[one], [two], [streamed]]))


@pytest.mark.full
def test_messages_of_anthropic_continue_each_other(drawn):
    for sample in drawn("messages"):
        assert not sample.fault, sample.fault
        assert sample.branches == () and texts(sample) == sample.text.split("|")


@pytest.mark.full
def test_a_fault_masks_its_episode_alone_and_says_why(drawn):
    samples = [*drawn("bad", ("0", "1", "2", "4", "5"), count=1), *drawn("bad", ("3",), count=1, timeout_s=3.0)]
    expected = ["", "ValueError: a defect", "signal 9", "instead of a number", "SystemExit", "no answer within rollout.agent.timeout_s (3 s)"]
    for sample, reason in zip(samples, expected, strict=True):
        assert reason in sample.fault and bool(sample.fault) == bool(reason), sample.fault
        assert sample.finish_reason is FinishReason.ABORT if reason else sample.text == "fine"
    (sample,) = drawn("silent", count=1)
    assert sample.fault == "the agent returned without a request to the model" and sample.token_ids == ()


@pytest.mark.full
def test_what_an_episode_cannot_have_is_refused_in_the_form_of_the_api(drawn):
    (sample,) = drawn("rude", count=1)
    assert sample.text == "'n' 'logprobs' 'response_format' 'tool_choice' invalid_api_key" and not sample.fault


@pytest.mark.full
def test_an_agent_that_cannot_be_loaded_is_refused(drawn, tmp_path):
    with pytest.raises(UserError, match="has no 'missing'"):
        drawn("missing")
    with pytest.raises(UserError, match="has no parameter for the question"):
        drawn("none")
    function = f"{tmp_path / 'agents.py'}:two"
    pool = AgentPool(AgentConfig(function=function, workers=1), None)
    pool.close()
    assert pool.columns == ["b"]
    with pytest.raises(UserError, match=r"has the parameter 'b', which is no column of the prompts \(they have 'level'\)"):
        check_agent_columns(["level"], function, pool.columns)
    check_agent_columns(["b"], function, pool.columns)


@pytest.mark.full
def test_an_agent_takes_the_columns_that_it_names_and_returns_its_reward(drawn):
    samples = drawn("judges", "012345", count=1, columns={"level": 5, "question": "another", "unit": "m"})
    assert [sample.outcome for sample in samples] == [{"reward": 0.25}, {"reward": 1.0, "turns": 3.0}, {}, {"reward": 1.0}, {}, {}]
    assert samples[1].text == "5 [] truth nothing ['unit']" and samples[0].text == samples[0].messages[-1]["content"]
    assert "keys 'score' and without 'reward'" in samples[2].fault and "it returned nan" in samples[4].fault and "instead of a number" in samples[5].fault
    assert decode_samples(encode_samples(samples)) == samples
    prompts = [Prompt(f"p{i}", "?", (1,)) for i in range(6)]
    with RewardPool(RewardsConfig((RewardFunctionConfig("agent"), RewardFunctionConfig("format_checker", format=FormatCheckerConfig(".*"))))) as pool:
        scores = pool.score(samples, prompts)
        spoken = replace(samples[0], outcome={})
        assert "the agent returned no number" in pool.score([spoken], prompts)[0].reason
    assert [score.value for score in scores] == [1.25, 2.0, None, 2.0, None, None] and scores[1].components["agent/turns"] == 3.0
    with RewardPool(RewardsConfig((RewardFunctionConfig("format_checker", format=FormatCheckerConfig(".*")),))) as pool:
        (unread,) = pool.score(samples[:1], prompts)
    assert unread.state is ScoreState.INFRASTRUCTURE_FAULT and "its agent returned a number, which no reward function reads" in unread.reason


@pytest.mark.full
def test_dropped_episodes_end_and_later_ones_are_their_own(llm, tmp_path):
    engine, folder = llm
    (tmp_path / "agents.py").write_text(AGENT)
    agents = Agents(AgentConfig(function=f"{tmp_path / 'agents.py'}:plain", workers=2), folder)
    settings = {**SETTINGS, "n": 2, "max_tokens": 60}
    try:
        dropped, prompt = InFlightAgents(engine.engine, agents, 256), Prompt("p0", "?", (1,), question="why")
        dropped.add(0, [prompt], settings)
        time.sleep(0.3)
        dropped.drop()
        kept = InFlightAgents(engine.engine, agents, 256)
        kept.add(0, [prompt], settings)
        again = kept.draw("all", lambda done, total: None)
        kept.add(0, [prompt], settings)
        assert kept.draw("all", lambda done, total: None) == again and all(not sample.fault for sample in again)
    finally:
        agents.close()
