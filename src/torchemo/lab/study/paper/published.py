"""The paper's own numbers, as printed (tables) or read off the plots to about 0.3 (figures).

Accuracy in percent with the half-width of its 95 % interval where one is printed; a dash is an empty
cell. Known slips of the tables are listed in ``docs/paper.md`` (A15, A16).
"""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Published:
    """Numbers of the paper as text: a header and rows, cells ``value``, ``value±half-width`` or ``-``."""

    csv: str
    read_off: bool = False
    unit: str = "accuracy, %"

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self.csv.strip().splitlines()[0].split(",")) if self.csv else ()

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The rows, as printed."""
        return [tuple(line.split(",")) for line in self.csv.strip().splitlines()[1:]]

    def mean(self, column: str, **where: str) -> float:
        """Average a column over the rows whose other columns have these texts."""
        place = self.header.index(column)
        keys = {self.header.index(name): text for name, text in where.items()}
        found = [
            value(row[place]) for row in self.rows if all(row[i] == t for i, t in keys.items())
        ]
        return sum(found) / len(found)

    def gain(self, column: str, over: str, **where: str) -> float:
        """Average how much one column exceeds another."""
        return round(self.mean(column, **where) - self.mean(over, **where), 2)


def value(cell: str) -> float:
    """Read a printed cell without its interval.

    Example:
        >>> value("53.94±1.45")
        53.94
    """
    return float(cell.split("±")[0])


T1 = Published(
    """
method,shot,dataset,without,with
MAML,1,Bird,53.94±1.45,56.32±1.33
MAML,1,Texture,31.66±1.31,34.75±1.41
MAML,1,Aircraft,51.37±1.38,53.99±1.33
MAML,1,Fungi,42.12±1.36,43.15±1.36
ANIL,1,Bird,52.57±1.44,54.78±1.43
ANIL,1,Texture,31.45±1.32,33.15±1.31
ANIL,1,Aircraft,50.45±1.34,52.79±1.33
ANIL,1,Fungi,41.14±1.34,43.75±1.31
MetaSGD,1,Bird,55.58±1.43,58.95±1.41
MetaSGD,1,Texture,32.38±1.32,36.26±1.33
MetaSGD,1,Aircraft,52.99±1.36,55.29±1.35
MetaSGD,1,Fungi,41.74±1.34,45.24±1.34
MAML,5,Bird,68.52±0.79,70.91±0.71
MAML,5,Texture,44.56±0.68,47.21±0.64
MAML,5,Aircraft,66.18±0.71,68.13±0.61
MAML,5,Fungi,51.85±0.85,56.17±0.75
ANIL,5,Bird,67.17±0.74,69.25±0.73
ANIL,5,Texture,43.41±0.68,45.78±0.68
ANIL,5,Aircraft,65.34±0.70,67.15±0.71
ANIL,5,Fungi,52.11±0.83,54.35±0.83
MetaSGD,5,Bird,67.87±0.74,72.74±1.40
MetaSGD,5,Texture,45.49±0.68,49.15±0.68
MetaSGD,5,Aircraft,66.84±0.70,69.73±0.70
MetaSGD,5,Fungi,52.51±0.81,58.21±0.79
""",
)

T2 = Published(
    """
dataset,SGD,Momentum,Adam,EMO
Bird,53.94±1.45,52.98±1.42,52.55±1.41,56.32±1.33
Texture,31.66±1.31,31.38±1.31,30.95±1.34,34.75±1.41
Aircraft,51.37±1.38,51.09±1.35,50.15±1.33,53.99±1.33
Fungi,42.12±1.36,41.54±1.35,41.04±1.31,43.15±1.36
""",
)

T3 = Published(
    """
method,dataset,sum,mean,transformer
MAML,Bird,54.35±1.34,56.32±1.33,55.91±1.35
MAML,Texture,33.13±1.45,34.75±1.41,34.23±1.40
MAML,Aircraft,52.53±1.30,53.99±1.33,53.15±1.30
MAML,Fungi,44.07±1.33,43.15±1.36,45.27±1.35
MetaSGD,Bird,57.15±1.31,57.03±1.40,58.95±1.41
MetaSGD,Texture,34.93±1.42,35.97±1.41,36.26±1.33
MetaSGD,Aircraft,53.12±1.27,54.01±1.25,55.29±1.35
MetaSGD,Fungi,43.49±1.32,44.13±1.31,45.24±1.34
ANIL,Bird,54.91±1.33,55.18±1.34,54.78±1.33
ANIL,Texture,32.71±1.30,33.14±1.40,33.15±1.41
ANIL,Aircraft,53.16±1.40,52.11±1.38,52.79±1.33
ANIL,Fungi,43.17±1.34,43.07±1.31,43.75±1.36
""",
)

T4 = Published(
    """
method,dataset,fifo,clock,lru
MAML,Bird,51.91±1.35,54.01±1.33,56.32±1.33
MAML,Texture,30.11±1.40,32.14±1.41,34.75±1.41
MAML,Aircraft,48.16±1.40,50.91±1.38,53.99±1.33
MAML,Fungi,41.17±1.35,43.97±1.35,43.15±1.36
ANIL,Bird,50.11±1.31,53.91±1.34,54.78±1.43
ANIL,Texture,29.11±1.41,32.94±1.40,33.15±1.31
ANIL,Aircraft,47.96±1.40,53.91±1.35,52.79±1.33
ANIL,Fungi,40.97±1.35,43.17±1.35,43.75±1.31
MetaSGD,Bird,53.05±1.34,58.95±1.41,57.31±1.34
MetaSGD,Texture,32.13±1.41,36.26±1.33,35.95±1.41
MetaSGD,Aircraft,49.16±1.41,55.21±1.35,56.19±1.34
MetaSGD,Fungi,41.61±1.34,45.24±1.35,44.75±1.36
""",
)

T5 = Published(
    """
dataset,mean-based gradient,transformer-based gradient
Bird,56.32±1.33,57.05±1.30
Texture,34.75±1.41,35.23±1.39
Aircraft,53.99±1.33,54.73±1.35
Fungi,43.15±1.36,43.45±1.37
""",
)

T6 = Published(
    """
method,optimiser,extra MFLOPs,extra M parameters,GPU memory GB
MAML,SGD,0,0,7.3
MAML,Adam,0.003,0.0004,7.7
MAML,EMO,0.04,0.003,8.1
MetaSGD,SGD,0,0,8.4
MetaSGD,Adam,0.004,0.0006,8.9
MetaSGD,EMO,0.07,0.009,9.7
""",
    unit="cost",
)

T7 = Published(
    """
method,Bird,Texture,Aircraft,Fungi,miniImageNet
ANIL,53.36±1.42,31.91±1.25,52.87±1.34,42.30±1.28,46.70±0.40
MAML,53.94±1.45,31.66±1.31,51.37±1.38,42.12±1.36,48.70±1.84
BMG,54.12±1.46,32.19±1.21,52.09±1.35,43.00±1.37,52.97±0.85
Meta-SGD,55.58±1.43,32.38±1.32,52.99±1.36,41.74±1.34,50.47±1.87
MUSML,60.52±0.33,41.33±1.30,54.69±0.69,45.60±0.43,-
HSML,60.98±1.50,35.01±1.36,57.38±1.40,44.02±1.39,50.38±1.85
TSA-MAML,61.37±1.42,35.41±1.39,58.78±1.37,44.17±1.25,48.44±0.91
ARML,62.33±1.47,35.65±1.40,58.56±1.41,44.82±1.38,50.42±1.73
ARML+EMO,64.31±1.35,37.25±1.43,59.99±1.35,46.15±1.38,57.84±0.93
""",
)

T8 = Published(
    """
method,Bird,Texture,Aircraft,Fungi,miniImageNet
MAML,68.52±0.79,44.56±0.68,66.18±0.71,51.85±0.85,63.11±0.92
Meta-SGD,67.87±0.74,45.49±0.68,66.84±0.70,52.51±0.81,64.03±0.94
HSML,71.68±0.73,48.08±0.69,73.49±0.68,56.32±0.80,65.91±0.95
ARML,73.34±0.70,49.67±0.67,74.88±0.64,57.55±0.82,66.87±0.93
TSA-MAML,72.31±0.71,49.50±0.68,74.01±0.70,56.95±0.80,65.52±0.92
ANIL,70.67±0.72,44.67±0.95,66.05±1.07,52.89±0.30,61.50±0.92
BMG,71.56±0.76,49.44±0.73,66.83±0.79,52.56±0.89,66.73±0.91
MUSML,76.69±0.72,52.41±0.75,77.76±0.82,57.74±0.81,65.12±1.48
ARML+EMO,77.17±0.65,53.25±0.68,77.83±0.63,59.15±0.79,71.05±0.91
""",
)

T9 = Published(
    """
method,mini 1-shot,mini 5-shot,tiered 1-shot,tiered 5-shot
SNAIL,55.71±0.99,68.88±0.92,-,-
DynamicFS,55.45±0.89,70.13±0.68,-,-
TADAM,58.50±0.30,76.70±0.30,-,-
MTL,61.20±1.80,75.50±0.80,-,-
VariationalFSL,61.23±0.26,77.69±0.17,-,-
TapNet,61.65±0.15,76.36±0.10,63.08±0.15,80.26±0.12
MetaOptNet,62.64±0.61,78.63±0.46,65.81±0.74,81.75±0.53
CTM,62.05±0.55,78.63±0.06,64.78±0.11,81.05±0.52
CAN,63.85±0.48,79.44±0.34,69.89±0.51,84.23±0.37
HVM,67.83±0.57,83.88±0.51,73.67±0.71,88.05±0.44
ARML+EMO,69.15±0.34,84.13±0.25,75.17±0.35,89.05±0.25
""",
)

F2 = Published(
    """
optimiser,0,1,2,3,4,5
SGD,33.1,41.0,50.2,58.5,62.2,63.1
Momentum,34.4,42.2,52.3,59.7,64.2,65.0
Adam,30.2,43.2,53.7,61.1,65.7,65.8
EMO,51.3,69.1,72.6,72.2,72.6,72.5
""",
    read_off=True,
)

F3 = Published(
    """
shot,0,20,50,100,200,500,1000,10000
1-shot,48.7,50.1,52.1,55.7,57.0,57.25,57.3,57.4
5-shot,51.7,53.1,56.2,58.0,59.0,60.2,59.3,59.4
""",
    read_off=True,
)

F4 = Published(
    """
trained on,tested on,MAML,MAML+EMO
Bird,Bird,53.5,57.5
Bird,Texture,26.0,23.3
Bird,Aircraft,49.0,50.2
Bird,Fungi,35.1,31.8
Texture,Bird,30.5,27.5
Texture,Texture,39.7,43.2
Texture,Aircraft,31.8,27.4
Texture,Fungi,26.3,24.9
Aircraft,Bird,47.6,49.5
Aircraft,Texture,25.1,22.2
Aircraft,Aircraft,62.9,65.4
Aircraft,Fungi,28.3,25.8
Fungi,Bird,28.5,25.5
Fungi,Texture,29.7,29.2
Fungi,Aircraft,26.9,24.4
Fungi,Fungi,46.2,50.8
""",
    read_off=True,
)

F6 = Published(
    """
optimiser,0,1,2,3,4,5
SGD,0,1.2,1.4,1.4,1.2,1.3
Momentum,0,1.4,1.5,1.5,1.3,1.5
Adam,0,1.7,1.8,1.8,1.7,1.8
EMO,1.7,1.9,2.1,2.0,2.1,1.9
""",
    read_off=True,
    unit="ms per inner step",
)

F7 = Published(
    """
shot,0,5,10,15,20,25,30,35
1-shot,48.7,50.3,52.4,55.9,57.0,57.0,57.0,57.0
5-shot,51.7,53.4,56.7,60.2,59.6,60.0,59.6,59.9
""",
    read_off=True,
)

F1 = Published("", read_off=True, unit="training loss; the axes have no numbers")
