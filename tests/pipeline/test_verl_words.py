"""verl's own keys as a recipe: what is understood, what is said of it, what is refused."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from rollsift.jobs.main import main
from rollsift.pipeline import recipes
from rollsift.schemas.errors import RecipeError
from rollsift.schemas.recipe import KPerBucket, Recipe

SHIPPED = files("rollsift.jobs") / "recipes"


def _load(folder: Path, text: str, *sets: str) -> tuple[Recipe, list[str]]:
    path = folder / "mine.yaml"
    path.write_text(text)
    notes: list[str] = []
    return recipes.load(str(path), sets, SHIPPED, notes.append), notes


def _refused(folder: Path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        _load(folder, text)
    return str(caught.value)


FILTER_SAMPLE = """
data: {train_batch_size: 64}
algorithm:
  adv_estimator: grpo
  filter_sample:
    enable: True
    metric: token efficiency
    retain_count: 4
"""


def test_filter_sample_is_metric_and_k(tmp_path: Path) -> None:
    """The port's metric and retain_count become metric and k; the rest is verl's own."""
    recipe, notes = _load(tmp_path, FILTER_SAMPLE)
    assert recipe == Recipe(name="mine", metric="token_efficiency", k=4)
    assert notes == ["verl's words are understood as metric=token_efficiency, k=4"]


def test_filter_sample_has_the_ports_defaults(tmp_path: Path) -> None:
    """With enable alone it is the 8 shortest, adaptive 8, 8, 6, 4."""
    recipe, _ = _load(tmp_path, "algorithm: {filter_sample: {enable: true}}")
    assert recipe == Recipe(name="mine", metric="response_length", k=8)
    recipe, _ = _load(tmp_path, "algorithm: {filter_sample: {enable: true, adaptive: true}}")
    assert recipe.k == KPerBucket(very_hard=8, hard=8, medium=6, easy=4)


def test_adaptive_counts_by_bucket_and_says_what_differs(tmp_path: Path) -> None:
    """Counts go by bucket, quartiles are exact, strict and running; retain_count is told idle."""
    recipe, notes = _load(
        tmp_path,
        """
        algorithm:
          filter_sample:
            {enable: true, adaptive: true, retain_count: 5, easy_count: 1, medium_count: 2,
             hard_count: 3, very_hard_count: 4}
        """,
    )
    assert recipe.k == KPerBucket(very_hard=4, hard=3, medium=2, easy=1)
    how = recipe.difficulty
    assert (how.quantiles, how.ties, how.scope, how.warmup) == ("exact", "strict", "running", 0)
    assert notes[0] == "algorithm.filter_sample.retain_count: has no effect with adaptive"
    assert notes[1].startswith("algorithm.filter_sample.adaptive: quartiles over all prompts of")
    assert "t-digest" in notes[1]
    assert len(notes) == 3


def test_counts_by_bucket_are_told_idle_without_adaptive(tmp_path: Path) -> None:
    """A key that has no effect is named, never read as if it had one."""
    recipe, notes = _load(
        tmp_path, "algorithm: {filter_sample: {enable: true, easy_count: 2, retain_count: 3}}"
    )
    assert recipe.k == 3
    assert "algorithm.filter_sample.easy_count: has no effect without adaptive" in notes


@pytest.mark.parametrize(
    ("metric", "judged"),
    [
        ("acc", "acc"),
        ("reward", "reward"),
        ("score", "reward"),
        ("seq_reward", "reward"),
        ("seq_final_reward", "reward"),
        ("format_ok", "format_ok"),  # verl takes any reward extra
    ],
)
def test_filter_groups_drops_groups_without_spread(
    tmp_path: Path, metric: str, judged: str
) -> None:
    """The rewards under verl's names are the log's reward, other names logged fields; groups stay
    whole or go."""
    section = f"{{enable: true, metric: {metric}, max_num_gen_batches: 10}}"
    recipe, notes = _load(tmp_path, f"algorithm: {{filter_groups: {section}}}")
    assert recipe.zero_variance == "drop"
    assert recipe.zero_variance_of == judged
    assert recipe.k == 1_000_000
    assert any("filter_groups.max_num_gen_batches: has no effect" in note for note in notes)
    assert any("before a KL penalty" in note for note in notes) == (metric == "seq_final_reward")


def test_both_sections_are_one_recipe(tmp_path: Path) -> None:
    """Groups without spread go, of the others filter_sample's k stay."""
    recipe, _ = _load(
        tmp_path,
        """
        algorithm:
          filter_sample: {enable: true, retain_count: 2}
          filter_groups: {enable: true, metric: seq_reward}
        """,
    )
    assert (recipe.zero_variance, recipe.k) == ("drop", 2)


def test_verls_own_default_section_is_read(tmp_path: Path) -> None:
    """The section as in verl 0.9's YAML, Hydra's _target_ included, is known key by key."""
    recipe, notes = _load(
        tmp_path,
        """
        algorithm:
          _target_: verl.trainer.config.AlgoConfig
          filter_groups:
            _target_: verl.trainer.config.FilterGroupsConfig
            enable: False
            metric: reward
            max_num_gen_batches: 0
            max_inflight_gen_batches: 1
          filter_sample: {enable: true}
        """,
    )
    assert recipe == Recipe(name="mine", k=8)
    assert notes[0] == ("algorithm.filter_groups.enable: is not true, so the section does nothing")


OVERRIDES = {
    "lines": "algorithm.filter_sample.enable=true\nalgorithm.filter_sample.retain_count=4\n",
    "signs": "+algorithm.filter_sample.enable=True\n++algorithm.filter_sample.retain_count=4\n",
    "hydra's list": "- +algorithm.filter_sample.enable=true\n"
    "- '+algorithm.filter_sample.retain_count=4'\n",
    "a script": "python3 -m verl.trainer.main_ppo \\\n    data.train_batch_size=64 \\\n"
    '    +algorithm.filter_sample.enable="true" \\\n'
    "    +algorithm.filter_sample.retain_count=4  # of 16\n",
    "dotted YAML": "algorithm.filter_sample.enable: true\nalgorithm.filter_sample: "
    "{retain_count: 4}\n",
}


@pytest.mark.parametrize("form", OVERRIDES)
def test_overrides_are_read_in_every_form(tmp_path: Path, form: str) -> None:
    """Signs, list dashes, quotes, line ends of a script and comments change nothing."""
    assert _load(tmp_path, OVERRIDES[form])[0] == Recipe(name="mine", k=4)


def test_a_quoted_metric_is_read(tmp_path: Path) -> None:
    """The blank in verl's metric may be quoted by the shell, by Hydra, or not at all."""
    for value in ("token efficiency", '"token efficiency"', "'token efficiency'"):
        text = f"algorithm.filter_sample.enable=true\nalgorithm.filter_sample.metric={value}\n"
        assert _load(tmp_path, text)[0].metric == "token_efficiency"


def test_set_goes_over_verls_words(tmp_path: Path) -> None:
    """-s changes what verl's words gave, and adds what verl has no word for."""
    recipe, _ = _load(tmp_path, FILTER_SAMPLE, "k=2", "min_correct=1")
    assert (recipe.k, recipe.min_correct, recipe.metric) == (2, 1, "token_efficiency")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "algorithm: {filter_sample: {enable: true, retain_cuont: 4}}",
            "algorithm.filter_sample.retain_cuont: verl has no such key; did you mean "
            "algorithm.filter_sample.retain_count?",
        ),
        (
            "algorithm: {filter_groups: {enable: false, max_batches: 4}}",
            "did you mean algorithm.filter_groups.max_num_gen_batches?",
        ),
        (
            "algorithm: {filter_sampel: {enable: true}}",
            "algorithm.filter_sampel: verl has no such key; did you mean algorithm.filter_sample?",
        ),
        (
            "algorithm: {filter_sample: {enable: true, retain_count: 0}}",
            "algorithm.filter_sample.retain_count: found '0', expected a whole number, 1 or more",
        ),
        (
            "algorithm: {filter_sample: {enable: true, adaptive: true, hard_count: 1.5}}",
            "algorithm.filter_sample.hard_count: found '1.5', expected a whole number, 1 or more",
        ),
        (
            "algorithm: {filter_sample: {enable: maybe}}",
            "algorithm.filter_sample.enable: found 'maybe', expected true or false",
        ),
        (
            "algorithm: {filter_sample: {enable: true, metric: shortest}}",
            "algorithm.filter_sample.metric: found 'shortest', expected \"response length\" or "
            '"token efficiency"',
        ),
        (
            "algorithm: {filter_groups: {enable: true}}",
            "algorithm.filter_groups.metric: not set",
        ),
        (
            "algorithm: {filter_groups: {enable: true, metric: std > 0}}",
            "algorithm.filter_groups.metric: found 'std > 0', expected one of acc, reward",
        ),
        (
            "algorithm: {filter_groups: [acc]}",
            "algorithm.filter_groups: found ['acc'], expected its keys",
        ),
        (
            "algorithm: {filter_groups: {enable: [true]}}",
            "algorithm.filter_groups.enable: found ['true'], expected true or false",
        ),
        ("algorithm: {adv_estimator: grpo}", "neither filter_sample nor filter_groups is enabled"),
        ("algorithm: {filter_groups: null}", "neither filter_sample nor filter_groups is enabled"),
        ("algorithm: grpo", "neither filter_sample nor filter_groups is enabled"),
        (
            "algorithm: {filter_sample: {enable: false, retain_count: 4}}",
            "neither filter_sample nor filter_groups is enabled",
        ),
        (
            "algorithm.filter_sample.enable=true\nalgorithm.filter_sample.enable=false\n",
            "algorithm.filter_sample.enable: given twice",
        ),
        (
            "algorithm.filter_sample.enable: true\nalgorithm: {filter_sample: {enable: true}}\n",
            "algorithm.filter_sample.enable: given twice",
        ),
        ("~algorithm.filter_sample.enable=true\n", "~algorithm.filter_sample.enable: takes a key"),
        (
            "algorithm.filter_sample.enable=${ENABLE}\n",
            "algorithm.filter_sample.enable: found '${ENABLE}', expected true or false",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    """Nothing in the two sections is passed over: the key is named, and what was expected."""
    assert said in _refused(tmp_path, text)


def test_the_command_line_says_what_it_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`filter -r` takes verl's file, and the notes stand on stderr before the work begins."""
    (tmp_path / "verl.yaml").write_text(FILTER_SAMPLE.replace("retain_count: 4", "retain_count: 1"))
    rows = [
        {"input": "p", "output": "x" * n, "score": s, "step": 1, "uid": "a"}
        for n, s in ((4, 0.0), (10, 1.0), (5, 1.0))
    ]
    run = tmp_path / "run"
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit) as left:
        main(["filter", *map(str, (tmp_path / "1.jsonl", "-r", tmp_path / "verl.yaml", "-o", run))])
    printed = capsys.readouterr()
    assert left.value.code == 0
    assert printed.out.startswith("verl: kept 1 of 3 rows")
    first = "note: verl's words are understood as metric=token_efficiency, k=1\n"
    assert printed.err.startswith(first)
