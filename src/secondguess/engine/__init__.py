"""Engine: the rows of all calls and requests on the same models decode together.

`models.py` holds the models, `shared_batch.py` admits rows and runs the rounds, `generation.py` turns commits into outputs,
`text_scores.py` has log-probabilities of given texts, and `service.py` runs requests on a thread of its own, for a server.
"""

from secondguess.engine.generation import NewPiece as NewPiece
from secondguess.engine.generation import Output as Output
from secondguess.engine.service import DeadlineError as DeadlineError
from secondguess.engine.service import DrainingError as DrainingError
from secondguess.engine.service import Engine as Engine
from secondguess.engine.service import EngineStatus as EngineStatus
from secondguess.engine.service import Event as Event
from secondguess.engine.service import Failed as Failed
from secondguess.engine.service import Finished as Finished
from secondguess.engine.service import QueueFullError as QueueFullError
from secondguess.engine.service import Request as Request
