"""Film policies that the scripts trained, side by side, for the README: results/figures/agents.webp.

    pip install -e ".[atari,box2d,mujoco,video]"
    MUJOCO_GL=egl python benchmarks/agents.py    # two hours, nearly all of which is Pong

What is not trained yet is trained. Then each policy plays an episode with its most likely actions, recorded
by the script itself (`--evaluate ... --capture-video`). Without a screen, MuJoCo needs MUJOCO_GL.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from experiments import FIGURES, HERE, ROOT
from moviepy import VideoFileClip
from PIL import Image, ImageDraw, ImageFont

FOLDER = HERE / "unfinished" / "agents"
SECONDS, FPS = 7, 20
SIZE, BAR = 200, 22  # pixels of a picture, which is square, and of its title


@dataclass
class Scene:
    """A policy, how it is trained, and how it is filmed."""

    title: str
    script: str
    env_id: str
    flags: str = ""
    start: float = 0  # second of the video that is shown first
    camera: str = "{}"  # arguments of the environment for the film


PONG = "--total-timesteps 2e6 --learning-rate 5e-4 --num-minibatches 8 --bfloat16 --num-threads 1 --seed 2"
TRACK = '{"camera_name": "track", "width": 400, "height": 400}'
SCENES = [
    Scene("CartPole, 100k steps", "ppo.py", "CartPole-v1", "--total-timesteps 1e5"),
    Scene("LunarLander, 1M steps", "ppo.py", "LunarLander-v3", "--total-timesteps 1e6"),
    Scene("HalfCheetah, 1M steps", "ppo_continuous.py", "HalfCheetah-v5", "--compile", 0, TRACK),
    Scene("Pong, 2M steps", "ppo_atari.py", "PongNoFrameskip-v4", PONG, 4),
]


def checkpoint_of(scene: Scene) -> Path:
    """The checkpoint of a trained policy. What was not trained, or not to the end, is trained."""
    command = [sys.executable, str(ROOT / scene.script), *scene.flags.split()]
    pattern = f"runs/{scene.env_id}__*/checkpoint.pt"
    if not any(FOLDER.glob(pattern)):
        subprocess.run([*command, "--env-id", scene.env_id], check=True, cwd=FOLDER)
    (path,) = FOLDER.glob(pattern)
    content = torch.load(path, weights_only=True)
    if content["state"]["global_step"] < content["args"]["total_timesteps"]:
        subprocess.run([*command, "--resume", str(path)], check=True, cwd=FOLDER)
    return path


def film(scene: Scene) -> list[Image.Image]:
    """The pictures of a policy, with its title."""
    checkpoint = checkpoint_of(scene)
    command = [sys.executable, str(ROOT / scene.script), "--evaluate", str(checkpoint), "--capture-video"]
    command += ["--eval-episodes", "1", "--env-kwargs", scene.camera]
    subprocess.run(command, check=True, cwd=FOLDER)
    video = max(checkpoint.parent.glob("videos/*.mp4"), key=lambda path: path.stat().st_mtime)
    font, pictures = ImageFont.load_default(13), []
    with VideoFileClip(str(video)) as clip:
        for index in range(SECONDS * FPS):
            second = min(scene.start + index / FPS, clip.duration - 0.1)
            picture = Image.fromarray(clip.get_frame(second))
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            square = picture.crop((left, top, left + side, top + side))
            canvas = Image.new("RGB", (SIZE, SIZE + BAR), "#1f2328")
            canvas.paste(square.resize((SIZE, SIZE), Image.Resampling.LANCZOS), (0, BAR))
            ImageDraw.Draw(canvas).text((SIZE / 2, BAR / 2), scene.title, "white", font, "mm")
            pictures.append(canvas)
    return pictures


def main() -> None:
    """Make the animated picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    frames = []
    for pictures in zip(*map(film, SCENES), strict=True):
        frame = Image.new("RGB", (SIZE * len(pictures), SIZE + BAR))
        for i, picture in enumerate(pictures):
            frame.paste(picture, (SIZE * i, 0))
        frames.append(frame)
    path = FIGURES / "agents.webp"
    first, *rest = frames
    first.save(path, save_all=True, append_images=rest, duration=1000 // FPS, loop=0, quality=50, method=6)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
