"""The files of ``raypipe init --aws`` and ``--kubernetes``, and what the nodes install."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from packaging.requirements import Requirement

from raypipe.commands.cluster_files import text_of
from raypipe.launch.nodes import TASKS
from tests.clusters.provider import AUTOSCALER, completed
from tests.command import raypipe
from tests.scenario import cases

PROJECT = Path(__file__).resolve().parents[2]
METADATA = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
CLUSTER: dict[str, Any] = yaml.safe_load(text_of("cluster.yaml", "aws", {}, PROJECT))
CLAIM, JOB = yaml.safe_load_all(text_of("kubernetes/rayjob.yaml", "kubernetes", {}, PROJECT))
PODS = JOB["spec"]["rayClusterSpec"]
EXPECTED = cases(__file__, "manifests")


def missing(found: Any, expected: Any, place: str = "") -> list[str]:
    """The places where something is not as expected; mappings of plain values are whole."""
    nested = expected.values() if isinstance(expected, dict) else ()
    if any(isinstance(each, dict | list) for each in nested) and isinstance(found, dict):
        parts = [(found.get(key), value, key) for key, value in expected.items()]
    elif isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        parts = list(zip(found, expected, range(len(found)), strict=True))
    else:
        return [] if found == expected else [f"{place}: {found!r}"]
    return [each for old, new, key in parts for each in missing(old, new, f"{place}/{key}")]


def test_cluster_yaml_is_valid_for_ray_with_what_ray_adds():
    prepared = completed(CLUSTER)
    jsonschema.validate(prepared, json.loads(AUTOSCALER.joinpath("ray-schema.json").read_text()))
    assert missing(prepared, EXPECTED["cluster"]) == []
    kinds = prepared["available_node_types"]
    assert kinds.keys() == EXPECTED["cluster"]["available_node_types"].keys()
    assert not {"InstanceMarketOptions", "IamInstanceProfile"} & set(kinds["head"]["node_config"])
    # Ray's own default is too old for the wheels of requirements.txt
    assert {kind["node_config"]["ImageId"] for kind in kinds.values()} == {"AMI"}
    assert kinds["cpu"]["resources"] == {TASKS: 32}


def test_nobody_reaches_the_dashboard_without_a_tunnel_and_a_token():
    start = CLUSTER["head_start_ray_commands"][-1]
    assert "--dashboard-host=127.0.0.1" in start
    assert any("RAY_AUTH_MODE=token" in command for command in CLUSTER["setup_commands"])
    assert "~/.ray/auth_token" in CLUSTER["file_mounts"]


def test_what_the_nodes_install_is_pinned_and_what_raypipe_asks_for():
    lines = (PROJECT / "requirements.txt").read_text().splitlines()
    pinned = [line.partition(";")[0].strip() for line in lines if not line.startswith("#")]
    pins = dict(line.split("==") for line in pinned)
    extras = METADATA["optional-dependencies"]
    used = [text for name in ("workloads", "cluster", "nlp", "tracking") for text in extras[name]]
    for wanted in map(Requirement, [*METADATA["dependencies"], *used]):
        if wanted.name != METADATA["name"]:  # else an extra that includes another
            assert wanted.specifier.contains(pins[wanted.name.lower()]), wanted
    assert "-r ~/project/requirements.txt" in "\n".join(CLUSTER["setup_commands"])
    recipe = text_of("kubernetes/Dockerfile", "kubernetes", {}, PROJECT)
    [base] = re.findall(r"^FROM rayproject/ray:(\S+)-py3\d+$", recipe, re.MULTILINE)
    # the tested one, too
    rays = {version("ray"), base, PODS["rayVersion"]}
    assert rays == {pins["ray"]}


def test_the_rayjob_has_what_the_definition_of_version_1_asks_for():
    assert missing(CLAIM, EXPECTED["claim"]) == []
    assert missing(JOB, EXPECTED["job"]) == []
    params = PODS["workerGroupSpecs"][1]["rayStartParams"]
    assert yaml.safe_load(yaml.safe_load(params["resources"])) == {TASKS: 16}


def test_the_entrypoint_runs_a_configuration_of_the_project_on_the_shared_volume(tmp_path):
    raypipe("init", tmp_path / "mine")
    text = text_of("kubernetes/rayjob.yaml", "kubernetes", {}, tmp_path / "mine")
    spec = list(yaml.safe_load_all(text))[1]["spec"]
    *command, config, option, run_dir = shlex.split(spec["entrypoint"])
    assert (command, option) == (["raypipe", "run"], "--run-dir")
    assert (tmp_path / "mine" / Path(config).relative_to("/opt/project")).is_file()
    head = PODS["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert Path(run_dir).is_relative_to(head["volumeMounts"][0]["mountPath"])
