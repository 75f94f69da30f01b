"""Film policies that the scripts trained, side by side, for the README: results/figures/agents.webp.

    pip install -e ".[atari,box2d,mujoco,video]"
    MUJOCO_GL=egl python benchmarks/agents.py    # two hours, nearly all of which is Pong

What is not trained yet is trained. Then each policy plays an episode with its most likely actions, recorded
by the script itself (`--evaluate ... --capture-video`). Without a screen, MuJoCo needs MUJOCO_GL.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from experiments import FIGURES, HERE, ROOT
from moviepy import VideoFileClip
from PIL import Image, ImageDraw, ImageFont

FOLDER = HERE / "unfinished" / "agents"
PONG = "--total-timesteps 2e6 --learning-rate 5e-4 --num-minibatches 8 --bfloat16 --num-threads 1 --seed 2"
SCENES = {  # title, script and flags; from which second of the episode, and how much faster than recorded
    "CartPole-v1": ("CartPole, 100k steps", "ppo.py", "--total-timesteps 1e5", 0, 1),
    "LunarLander-v3": ("LunarLander, 1M steps", "ppo.py", "--total-timesteps 1e6", 0, 1),
    "HalfCheetah-v5": ("HalfCheetah, 1M steps", "ppo_continuous.py", "--compile", 1, 1),
    "PongNoFrameskip-v4": ("Pong, 2M steps", "ppo_atari.py", PONG, 4, 1),
}
SECONDS, FPS = 6, 12.5
SIZE, BAR = 200, 22  # pixels of a picture, which is square, and of its title


def checkpoint_of(env_id: str) -> Path:
    """The checkpoint of a trained policy. It is trained if there is none."""
    pattern = f"runs/{env_id}__*/checkpoint.pt"
    if not any(FOLDER.glob(pattern)):
        _, script, flags, *_ = SCENES[env_id]
        command = [sys.executable, str(ROOT / script), "--env-id", env_id, *flags.split()]
        subprocess.run(command, check=True, cwd=FOLDER)
    return next(FOLDER.glob(pattern))


def film(env_id: str) -> list[Image.Image]:
    """The pictures of a policy, with its title."""
    title, script, _, start, faster = SCENES[env_id]
    checkpoint = checkpoint_of(env_id)
    command = [sys.executable, str(ROOT / script), "--evaluate", str(checkpoint), "--capture-video"]
    subprocess.run([*command, "--eval-episodes", "1"], check=True, cwd=FOLDER)
    video = max(checkpoint.parent.glob("videos/*.mp4"), key=lambda path: path.stat().st_mtime)
    font, pictures = ImageFont.load_default(13), []
    with VideoFileClip(str(video)) as clip:
        times = (start + faster * i / FPS for i in range(round(SECONDS * FPS)))
        for time in times:
            picture = Image.fromarray(clip.get_frame(min(time, clip.duration - 0.1)))
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            square = picture.crop((left, top, left + side, top + side))
            canvas = Image.new("RGB", (SIZE, SIZE + BAR), "#1f2328")
            canvas.paste(square.resize((SIZE, SIZE), Image.Resampling.LANCZOS), (0, BAR))
            ImageDraw.Draw(canvas).text((SIZE / 2, BAR / 2), title, "white", font, "mm")
            pictures.append(canvas)
    return pictures


def main() -> None:
    """Make the animated picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    films = [film(env_id) for env_id in SCENES]
    frames = []
    for row in itertools.zip_longest(*films):
        frame = Image.new("RGB", (SIZE * len(row), SIZE + BAR))
        for i, picture in enumerate(row):
            frame.paste(picture, (SIZE * i, 0))
        frames.append(frame)
    path = FIGURES / "agents.webp"
    first, *rest = frames
    first.save(path, save_all=True, append_images=rest, duration=1000 / FPS, loop=0, quality=40, method=6)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
