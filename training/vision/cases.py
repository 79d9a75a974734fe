"""Held-out questions about held-out images: other seeds, every other one an untrained combination."""

from dataclasses import dataclass
from io import BytesIO
from random import Random

from training.vision.draw import draw_image
from training.vision.judge import is_right
from training.vision.questions import QuestionAnswer, ask
from training.vision.scenes import Scene, draw_scene


@dataclass(frozen=True, slots=True)
class Case:
    """unseen: the scene holds only untrained combinations; see `scenes.held_out`."""

    scene: Scene
    question_answer: QuestionAnswer
    unseen: bool

    @property
    def kind(self) -> str:
        return self.question_answer.kind

    @property
    def question(self) -> str:
        return self.question_answer.question

    def png(self) -> bytes:
        """The image as a file."""
        file = BytesIO()
        draw_image(self.scene).save(file, "PNG")
        return file.getvalue()

    def is_right(self, answer: str) -> bool:
        """The verdict of the judge."""
        return is_right(answer, self.question_answer.truth)


def case(number: int, kind: str | None = None) -> Case:
    """Return one case; the same number gives the same case. kind: of scene, else any."""
    rng, unseen = Random(f"vision test:{number}"), number % 2 == 1
    scene = draw_scene(rng, kind, unseen)
    return Case(scene, ask(rng, scene), unseen and scene.kind in ("many", "digit"))


def cases(count: int, kind: str | None = None) -> list[Case]:
    """Return the first cases."""
    return [case(number, kind) for number in range(count)]
