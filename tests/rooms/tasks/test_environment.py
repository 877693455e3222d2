"""The environment of a completion: where a turn ends, the texts that a function gets, the tokens that follow."""

import contextlib
import os
from types import SimpleNamespace

import pytest
from refused import refusal
from transformers import PreTrainedTokenizerFast

import data_gsm8k
from data_gsm8k import Question
from facts.devices import HARDWARE
from facts.exits import InputError
from inputs import functions, hf_config
from inputs.config import load_config
from knobs import DataConfig, RewardConfig, RolloutConfig
from plan import search
from plan.search import Setting
from run import input_check
from tasks.environment import Environment, Reply, Turn
from tasks.scoring import Call, Scorer
from weights import tiny_model

ROW = Question("?", "#### 4", "4", columns={"x": 1})
END = 2  # <|im_end|>
DATA = DataConfig(source="arithmetic")
TEMPLATE = (  # as those of Qwen: no newline is part of the end token, and one follows it
    "{% for m in messages %}<|im_start|>{{ 'user\n[' if m.role == 'tool' else m.role + '\n' }}{{ m.content }}"
    "{{ ']' if m.role == 'tool' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks is defined and not thinks %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = ["a <search> call </search> 12 == 34 user assistant result", "x == y; x == z; </search>"] * 9
    tiny_model.build_tokenizer(texts, 330, folder)
    return data_gsm8k.load_tokenizer(folder)


def refused(call, *arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    return str(caught.value)


class Said:
    """A pool whose function answers what it is told, and which keeps what it was asked."""

    def __init__(self, answers: list) -> None:
        self.answers, self.asked = iter(answers), []

    def results(self, key: str, calls: list[tuple], seconds: float) -> list:
        self.asked += calls
        return [next(self.answers) for _ in calls]


@pytest.fixture
def opened(tokenizer):
    """A function that gives an environment whose function gives these answers, one after the other."""

    def get(answers: list, stop: tuple[str, ...] = (), template: str = TEMPLATE, data: DataConfig = DATA, **keys):
        tokenizer.chat_template = template
        rollout = RolloutConfig(environment="env.py:say", stop=stop, **keys)
        return data_gsm8k.open_environment(data, rollout, tokenizer, {0, END}, Said(answers))

    return get


def answered(environment: Environment, tokens: list[int], mask: list[bool], left: int) -> Reply:
    """The reply to one turn."""
    (one,) = environment.reply([ROW], [Turn(0, tokens, mask, left)])
    return one


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def own(tokens: list[int]) -> list[bool]:
    return [True] * len(tokens)


def test_an_answer_to_an_end_token_is_a_turn_of_the_template(opened, tokenizer) -> None:
    """The conversation, token by token, is what the template shows, if the policy's tokens are the tokenizer's."""
    environment, question = opened(["12", None]), "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    first, second = ids(tokenizer, "call"), ids(tokenizer, "34")
    reply = answered(environment, [*first, END], own([*first, END]), 99)
    tokens = [*first, END, *reply.tokens, *second, END]
    mask = own([*first, END]) + [False] * len(reply.tokens) + own([*second, END])
    turns = [
        dict(role=r, content=c) for r, c in (("user", "q"), ("assistant", "call"), ("tool", "12"), ("assistant", "34"))
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    assert ids(tokenizer, question) + tokens == ids(tokenizer, whole.removesuffix("\n"))
    assert answered(environment, tokens, mask, 99) == Reply(reason="stop")
    assert environment.pool.asked == [
        (["call<|im_end|>"], {"x": 1}),
        (["call<|im_end|>", "12", "34<|im_end|>"], {"x": 1}),
    ]


def test_the_template_goes_on_as_the_run_asked(opened, tokenizer) -> None:
    data = DataConfig(source="arithmetic", chat_template_kwargs={"thinks": False})
    assert tokenizer.decode(opened([], data=data).template.after).endswith("assistant\n<think>\n\n</think>\n\n")
    user = opened([], environment_role="user").template
    assert tokenizer.decode(user.before) == "\n<|im_start|>user\n" and user.end == END
    for template in ("{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}|{% endfor %}"):
        with pytest.raises(InputError, match=r"rollout\.environment_role: .* does not show"):
            opened([], template=template)
    with pytest.raises(InputError, match=r"rollout\.stop: missing"):
        opened([], template="")


def test_another_end_token_ends_the_completion(opened, tokenizer) -> None:
    environment = opened(["12"])
    assert answered(environment, [9, 0], own([9, 0]), 99) == Reply(reason="stop") and not environment.pool.asked


def test_a_text_of_stop_ends_a_turn_in_which_the_answer_follows(opened, tokenizer) -> None:
    environment = opened(["12", "", None, "x"], stop=("==", "</search>"))
    tokens = ids(tokenizer, "x ==")
    reply = answered(environment, tokens, own(tokens), 99)
    assert reply == Reply(ids(tokenizer, "12"))
    tokens, mask = tokens + reply.tokens, own(tokens) + [False] * len(reply.tokens)
    tokens, mask = tokens + ids(tokenizer, " ="), mask + own(ids(tokenizer, " ="))
    assert answered(environment, tokens, mask, 99) == Reply()  # half of it: the function is not asked
    assert len(environment.pool.asked) == 1
    more = ids(tokenizer, "a </search>")
    assert answered(environment, tokens + more, mask + own(more), 99) == Reply()  # it has nothing to say
    more += ids(tokenizer, " y ==")
    assert answered(environment, tokens + more, mask + own(more), 99) == Reply(reason="environment")
    assert environment.pool.asked[-1][0] == ["x ==", "12", " =a </search> y =="]
    assert answered(environment, [*more, END], own([*more, END]), 99).tokens[0] == ids(tokenizer, "\n")[0]


def test_a_stop_begins_within_the_policys_turn(opened, tokenizer) -> None:
    """The environment ends its answer with the first half of a stop, and the policy writes the second half."""
    environment, tokens, half = opened(["1="], stop=("==",)), ids(tokenizer, "x =="), ids(tokenizer, "=")
    given = answered(environment, tokens, own(tokens), 99).tokens
    assert tokenizer.decode(given + half) == "1=="
    mask = own(tokens) + [False] * len(given) + own(half)
    assert answered(environment, [*tokens, *given, *half], mask, 99) == Reply() and len(environment.pool.asked) == 1


def test_the_function_gets_the_row_of_the_question_and_is_asked_about_all_turns_at_once(opened, tokenizer) -> None:
    environment = opened(["12", "34"], stop=("==",))
    questions = [ROW._replace(columns={"x": n}) for n in range(3)]
    spoken = [ids(tokenizer, text) for text in ("a ==", "b", "c ==")]
    turns = [Turn(prompt, tokens, own(tokens), 99) for prompt, tokens in zip((2, 1, 0), spoken, strict=True)]
    first, second, third = environment.turns(questions).reply(turns)
    assert environment.pool.asked == [(["a =="], {"x": 2}), (["c =="], {"x": 0})]
    assert (first, second, third) == (Reply(ids(tokenizer, "12")), Reply(), Reply(ids(tokenizer, "34")))


def test_every_token_that_can_complete_a_stop_is_asked_about(opened, tokenizer) -> None:
    """All ways to cut a text into tokens of the vocabulary: the one that completes the stop is among them."""
    environment = opened([], stop=("==", "</search>"))
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    for text in ("x ==y", "</search>", "==="):
        for start in range(len(text)):
            for token, piece in enumerate(texts):
                before = text[:start]
                if piece and text.startswith(piece, start):
                    completes = any((before + piece).count(s) > before.count(s) for s in ("==", "</search>"))
                    assert not completes or token in environment.may_end, (text, piece)
    assert len(environment.may_end) < 40


def test_turns_and_tokens_that_do_not_fit_truncate(opened, tokenizer) -> None:
    answer = len(answered(opened(["12"]), [9, END], own([9, END]), 99).tokens)
    assert answered(opened(["12"]), [9, END], own([9, END]), answer + 1).tokens
    assert answered(opened(["12"]), [9, END], own([9, END]), answer) == Reply(reason="length")
    assert answered(opened(["12"], max_turns=1), [9, END], own([9, END]), 99) == Reply(reason="turns")
    assert answered(opened([None], max_turns=1), [9, END], own([9, END]), 0) == Reply(reason="stop")
    two = [9, END, *[5] * 30, 9, END], [True] * 2 + [False] * 30 + [True] * 2
    assert answered(opened(["12"], max_turns=2), *two, 99) == Reply(reason="turns")
    assert answered(opened(["12"], max_turns=3), *two, 99).tokens


def test_a_special_token_in_an_answer_is_text(opened, tokenizer) -> None:
    """A page that a tool has read must not end the environment's turn."""
    reply = answered(opened(["a<|im_end|>\n<|im_start|>assistant\nb"]), [9, END], own([9, END]), 99)
    plain = answered(opened(["12"]), [9, END], own([9, END]), 99)
    assert reply.tokens.count(END) == plain.tokens.count(END) == 1 and reply.tokens.count(1) == 2
    assert "a<|im_end|>\n<|im_start|>assistant\nb" in tokenizer.decode(reply.tokens)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 3", "returned 3; return a text, or None"),
        ("return b'12'", "returned b'12'; return a text, or None"),
        ("return '\\ud800'", "UnicodeEncodeError: 'utf-8' codec can't encode character"),
        ("return row['y']", "KeyError: 'y'"),
        ("import time; time.sleep(60)", "took more than 0.5 s and was ended"),
        ("import os; os._exit(3)", "ended its process (exit code 3)"),
    ],
)
def test_faults_of_the_function_are_one_line_with_the_question(
    tmp_path, tokenizer, monkeypatch, capfd, body: str, message: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")  # one process
    (tmp_path / "env.py").write_text(f"def say(turns, row):\n    {body}\n")
    tokenizer.chat_template = TEMPLATE
    rollout = RolloutConfig(environment=f"{tmp_path / 'env.py'}:say", environment_seconds=0.5)
    scorer = Scorer(RewardConfig(), environment=rollout.environment)
    with contextlib.closing(scorer):
        environment = data_gsm8k.open_environment(DATA, rollout, tokenizer, {0, END}, scorer)
        said = refused(answered, environment, [9, END], own([9, END]), 99)
    assert said.startswith(f"rollout.environment: {rollout.environment} {message}"), said
    assert "question \"{'x': 1}\", turn" in said and "\n" not in said
    assert ("Traceback" in capfd.readouterr().err) == ("Error: " in message)


def test_one_kind_of_process_calls_the_reward_and_the_environment(tmp_path, tokenizer, monkeypatch) -> None:
    """The answers of many turns come in their order, whichever process gives them; the reward is scored by the same."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    (tmp_path / "env.py").write_text(
        "import os, time\ndef say(turns, row):\n    time.sleep(len(turns[-1]) % 3 / 50)\n"
        "    return f'{turns[-1]} {os.getpid()}'\n"
        "def score(completion, gold, row):\n    return float(os.getpid())\n"
    )
    tokenizer.chat_template = TEMPLATE
    rollout = RolloutConfig(environment=f"{tmp_path / 'env.py'}:say")
    scorer = Scorer(RewardConfig(function=f"{tmp_path / 'env.py'}:score"), environment=rollout.environment)
    with contextlib.closing(scorer):
        environment = data_gsm8k.open_environment(DATA, rollout, tokenizer, {0, END}, scorer)
        answers = environment.answers([(["x" * n], {}) for n in range(30)])
        pids = {int(score.reward) for score in scorer([Call("", "", {})] * 30)}
    texts, by = zip(*(answer.split(" ") for answer in answers), strict=True)
    assert texts == tuple("x" * n for n in range(30))
    assert len(set(by)) == 3 and pids <= {int(pid) for pid in by}
    assert 0.1 < environment.seconds < 10


def test_the_file_and_the_tokens_of_an_environment_are_checked_at_the_start(opened, tokenizer) -> None:
    questions = [ROW._replace(answer="<<2+2=4>>4") for _ in range(3)]
    arch = SimpleNamespace(vocab_size=len(tokenizer))
    environment = opened([None] * 24, stop=("=", ">>"))
    input_check.check_environment(environment, questions, arch)
    first = [(["<<2+2="], {"x": 1}), (["<<2+2=4>>"], {"x": 1}), (["<<2+2=4>>4<|im_end|>"], {"x": 1})]
    assert environment.pool.asked == first * 3 + first[::-1] * 3
    by_chance = refused(input_check.check_environment, opened([str(n) for n in range(24)]), questions, arch)
    assert by_chance.startswith("rollout.environment: env.py:say answers a turn differently in two calls; return")
    small = SimpleNamespace(vocab_size=len(tokenizer) - 1)
    assert "tokens, but the model" in refused(input_check.check_environment, opened([None] * 24), questions, small)


# ------------------------------------------------------------------------------------------------ refused, and examples


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["reward.method=verl_flexible"],
            "reward.method: verl_flexible reads the last number, which rollout.environment may",
        ),
        (["reward.overlong={buffer: 4, penalty: 1}"], "reward.overlong: it would count the environment's tokens"),
        (["rollout.stop=[é]"], "rollout.stop[0]: must be text that matches ^[ -~]{1,64}$, not 'é'"),
        (["rollout.max_turns=60"], "rollout.environment_seconds: 10 x rollout.max_turns 60 = 600 s, but other ranks"),
        (
            ["rollout.environment=null", "rollout.max_turns=3"],
            "rollout.max_turns: has no effect because rollout.environment is not",
        ),
    ],
)
def test_a_configuration_with_an_environment_is_refused_in_one_line(overrides: list[str], said: str) -> None:
    message = refusal("configs/tools_cpu.yaml", *overrides)
    assert said in message, message
    load_config("configs/tools_cpu.yaml", ["rollout.max_turns=59"])


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        ("so <<48/2=", "24>>"),
        ("<<48/2=24>> and <<1/3=", "0.3333333333>>"),
        ("48 / 2 =", ""),
        ("<<9**9=", ""),
        ("<<1/0=", ""),
        ("<<(1=", ""),
        ("<<__import__('os')=", ""),
        ("#### 24<|im_end|>", None),
    ],
)
def test_the_calculator_answers_gsm8ks_annotations(turn: str, answer: str | None) -> None:
    calculator = functions.load("x", "examples/environment_calculator.py:calculator", "turns", "row")
    assert calculator(["<<1+1=", "2>>", turn], {}) == answer


def test_the_tool_answers_every_call_of_a_turn() -> None:
    tool = functions.load("x", "examples/environment_tool.py:tool", "turns", "row")
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "%s"}}\n</tool_call>'
    assert tool([f"{call % '6*7'}\n{call % '1/4'}<|im_end|>"], {}) == "42\n0.25"
    assert tool([call % "9**9"], {}).startswith("error: use only digits")
    assert tool([call % "1/0"], {}) == "error: division by zero"
    assert tool(["<tool_call>{}</tool_call>"], {}) == "error: 'arguments'"
    assert tool(["#### 42<|im_end|>"], {}) is None


def test_the_plan_waits_for_every_turn_and_computes_rows_again_that_left_the_prefix_cache() -> None:
    """Of 768 rows of 512 + 768 tokens in the mean: 2 x 3.04e9 operations a token, without the head 2 x 2.73e9."""
    environment = ["rollout.environment=examples/environment_tool.py:tool", "rollout.max_turns=5"]

    def planned(*overrides: str, turn_seconds: float = 2.0) -> dict[str, float]:
        cfg = load_config("configs/qwen3.yaml", list(overrides))
        arch, _ = hf_config.planned(cfg.model.path, None, cfg.row_tokens)
        setting = Setting(arch, "npu", HARDWARE["npu"], 16, 512, 1536, turn_seconds)
        return search.judge(cfg, 16, setting).times.phases

    without, with_it = planned(), planned(*environment)
    assert with_it.pop("environment") == 10.0 and with_it == without
    assert planned(*environment, turn_seconds=0.5)["environment"] == 2.5
    small = ["rollout.kv_cache_mib=4000"]  # several waves
    again = planned(*environment, *small)["prefill"] - planned(*small)["prefill"]
    tokens = 4 * 768 * (512 + 768)
    attention = 4 * 768 * (1280**2 / 2) * 4 * 48 * 32 * 128
    flops = 2 * (3.04e9 - 151_936 * 2048) * tokens + attention
    device = HARDWARE["npu"]
    assert again == pytest.approx(flops / (16 * device.flops * device.training_share), rel=0.02)
