"""The trained policies of the folder policies/, and the recipes for the Hugging Face Hub."""

import base64
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import helpers
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
CARDS = sorted(path for path in ROOT.glob("policies/*.md") if path.name != "README.md")
RECIPES = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SHORT = "--num-envs 4 --num-steps 16 --num-minibatches 1 --update-epochs 1 --total-timesteps 100"


def call(command, folder, status=0):
    """Run a command of a card in a folder that has the policies. Return its output."""
    _, file, *words = shlex.split(command)
    script = importlib.import_module(file.removesuffix(".py"))
    shutil.copytree(ROOT / "policies", folder / "policies", dirs_exist_ok=True)
    done = helpers.call(SimpleNamespace(script=script, file=file), folder, *words)
    assert done.status == status, done.err
    return done.out if status == 0 else done.err


def commands_of(card):
    """Return the commands of a card: one that plays the policy, and one that begins a run with it."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", card.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    play, start = block.splitlines()
    return play, start


def played(output):
    """Return the mean, the deviation and the number of the returns that an evaluation printed."""
    numbers = re.search(r"evaluation return (\S+) \+/- (\S+) in (\d+) episodes", output).groups()
    return [float(number) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_the_command_of_a_card_plays_its_policy_and_finds_its_return(card, tmp_path):
    """On another processor, or with other versions of a simulator, an episode may be another one."""
    mean, _, episodes = played(call(commands_of(card)[0], tmp_path))
    text = card.read_text(encoding="utf-8")
    of_all, deviation = map(float, re.search(r"value: (\S+) \+/- (\S+)", text).groups())
    of_these = float(re.search(r"which the command below plays \| (\S+) \|", text)[1])
    assert episodes >= 10
    assert abs(mean - of_these) <= deviation / episodes**0.5 + 0.02 * abs(of_these)
    assert abs(mean - of_all) <= 4 * deviation / episodes**0.5 + 0.02 * abs(of_all)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)
def test_a_run_begins_with_the_networks_and_normalisers_of_a_policy(card, tmp_path):
    command = f"{commands_of(card)[1]} {SHORT} --learning-rate 0"
    call(command if "ppo_gpu" in command else f"{command} --eval-episodes 1", tmp_path)
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    before = torch.load(card.with_suffix(".pt"), weights_only=True)["agent"]
    after = torch.load(checkpoint, weights_only=True)["agent"]
    assert before.keys() == after.keys()
    for name in before:
        if "moments" not in name:
            assert torch.equal(before[name], after[name]), name
        elif "count" not in name:  # the run has added some numbers
            torch.testing.assert_close(after[name], before[name], rtol=0.02, atol=0.02)
    assert after["obs_moments.count"] > before["obs_moments.count"] > 1000


def test_each_policy_has_a_card_and_a_row_and_no_optimizer():
    files = sorted(ROOT.glob("policies/*.pt"))
    assert [file.with_suffix(".md") for file in files] == CARDS
    assert len(files) == 10
    table = (ROOT / "policies" / "README.md").read_text(encoding="utf-8")
    for file in files:
        assert f"[{file.stem}]({file.stem}.md)" in table
        assert "optimizer" not in torch.load(file, weights_only=True)


def test_a_policy_that_meets_another_task_says_on_which_one_it_was_trained(tmp_path):
    """Both robots have 17 observations and 6 actions."""
    words = "policies/HalfCheetah-v5.pt --env-id Walker2d-v5 --eval-episodes 1"
    output = call(f"python ppo_continuous.py --evaluate {words}", tmp_path)
    assert "after 1,001,472 steps of HalfCheetah-v5" in output
    output = call(f"python ppo_continuous.py --init {words} {SHORT}", tmp_path)
    assert "policies/HalfCheetah-v5.pt was trained on HalfCheetah-v5" in output
    assert "was trained on" not in call(f"{commands_of(CARDS[0])[1]} {SHORT}", tmp_path)


def test_a_policy_without_an_optimizer_is_not_resumed(tmp_path):
    command = "python ppo.py --resume policies/CartPole-v1.pt --total-timesteps 1e6"
    assert "--init" in call(command, tmp_path, status=2)


# The Hugging Face Hub


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the Hub: it makes repositories, takes commits of small files, and gives files back."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes] = {}  # noqa: RUF012

    def answer(self, content=b"{}", **headers):
        self.send_response(200)
        for name, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            url = f"http://{self.headers['Host']}/my-name/policy"
            self.answer(json.dumps({"url": url, "id": "my-name/policy"}).encode())
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answers = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in asked
            ]
            self.answer(json.dumps({"files": answers}).encode())
        elif "/commit/" in self.path:
            for line in body.splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    self.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
            url = f"http://{self.headers['Host']}/my-name/policy/commit/1"
            self.answer(json.dumps({"commitUrl": url, "commitOid": "1"}).encode())
        elif self.path == "/api/validate-yaml":
            self.answer(b'{"errors": [], "warnings": []}')
        else:
            self.send_error(404)

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if name == "whoami-v2":
            self.answer(b'{"type": "user", "name": "my-name"}')
        elif name in self.files:
            self.answer(self.files[name], X_Repo_Commit="1" * 40, ETag='"1"')
        else:
            self.send_error(404)

    def do_HEAD(self):
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_policy_goes_to_the_hub_with_a_card_and_comes_back(trained, tmp_path):
    """By the library of the Hub and a server that stands in for it."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    Hub.files.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_TOKEN": "hf_test",
    }
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    policy = ROOT / "policies" / "CartPole-v1.pt"
    content = torch.load(policy, weights_only=True)
    content["args"] |= {"init": "/home/secret/checkpoint.pt"}
    torch.save(content | {"optimizer": {}}, tmp_path / "checkpoint.pt")

    def program(name, *words):
        (text,) = re.findall(rf"^```python\n(# {name}.*?)^```", RECIPES, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(text, encoding="utf-8")
        command = [sys.executable, name, *words, "my-name/policy"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "evaluation return 500 " in program("to_hub.py", "checkpoint.pt")
    card = huggingface_hub.ModelCard(Hub.files["README.md"].decode())
    (result,) = card.data.eval_results
    assert result.metric_value == "500.00 +/- 0.00"
    assert result.dataset_name == "CartPole-v1"
    assert '"learning_rate": ' in card.text
    assert b"secret" not in b"".join(Hub.files.values())
    (tmp_path / "policy.pt").unlink()
    assert "return 500.0" in program("from_hub.py")
    server.shutdown()
