"""Generate short stories in plain English from a grammar, for the demo and for quick tests.

People, places, actions and tools belong together, so that a model that uses context can predict a masked word, and a
model of word frequencies cannot.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Trade:
    """A profession with its place, tool and materials."""

    worker: str
    position: str
    tool: str
    material: str
    product: str
    makes: str
    made: str
    helper: str


TRADES = (
    Trade("smith", "forge", "hammer", "iron", "horseshoe", "hammers", "hammered", "bellows"),
    Trade("baker", "bakery", "oven", "flour", "bread", "bakes", "baked", "apron"),
    Trade("carpenter", "workshop", "saw", "wood", "table", "builds", "built", "ladder"),
    Trade("tailor", "shop", "needle", "cloth", "coat", "sews", "sewed", "mirror"),
    Trade("fisherman", "harbour", "net", "bait", "fish", "catches", "caught", "boat"),
    Trade("gardener", "garden", "spade", "soil", "roses", "plants", "planted", "basket"),
    Trade("potter", "kiln", "wheel", "clay", "bowl", "shapes", "shaped", "shelf"),
    Trade("printer", "press", "ink", "paper", "newspaper", "prints", "printed", "lamp"),
    Trade("farmer", "field", "plough", "seed", "wheat", "grows", "grew", "cart"),
    Trade("shepherd", "meadow", "shears", "wool", "blanket", "weaves", "wove", "fence"),
    Trade("cook", "kitchen", "pot", "onions", "soup", "boils", "boiled", "spoon"),
    Trade("beekeeper", "orchard", "smoker", "wax", "honey", "gathers", "gathered", "jar"),
)
PEOPLE = (
    *((name, "she", "her") for name in ("Anna", "Clara", "Edith", "Greta", "Irene", "Marta", "Nora", "Olga")),
    *((name, "he", "his") for name in ("Bruno", "Carl", "David", "Felix", "Hugo", "Jonas", "Oscar", "Paul")),
)
ANIMALS = (
    ("dog", "barks", "bone"),
    ("cat", "purrs", "milk"),
    ("horse", "neighs", "hay"),
    ("hen", "clucks", "corn"),
    ("goat", "bleats", "leaves"),
    ("duck", "quacks", "crumbs"),
)
SEASONS = (
    ("spring", "rain", "umbrella", "green"),
    ("summer", "sun", "hat", "hot"),
    ("autumn", "wind", "scarf", "brown"),
    ("winter", "snow", "gloves", "cold"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FEELINGS = (("tired", "sleeps"), ("happy", "sings"), ("hungry", "eats"), ("thirsty", "drinks"), ("curious", "asks"))


def small_world(stories: int = 12000, seed: int = 0) -> Iterator[str]:
    """Return stories of one to a few sentences, deterministic for a seed."""
    draw = Random(seed)
    for _ in range(stories):
        opening, middle, ending = _sentences(draw)
        if draw.random() < 0.7:
            # a single sentence must be predictable from its own words
            yield draw.choice([opening, *middle, ending])
        else:
            chosen = sorted(draw.sample(range(len(middle)), draw.randint(2, 5)))
            yield " ".join([opening, *(middle[index] for index in chosen), ending])


def _sentences(draw: Random) -> tuple[str, list[str], str]:
    """Return the sentences about one day of one person: an opening, events, an ending."""
    (name, they, their), (friend, friend_they, friend_their) = draw.sample(PEOPLE, 2)
    trade, other = draw.sample(TRADES, 2)
    animal, sound, food = draw.choice(ANIMALS)
    season, weather, wear, colour = draw.choice(SEASONS)
    feeling, deed = draw.choice(FEELINGS)
    day, number = draw.randrange(7), draw.choice(NUMBERS)
    today, tomorrow = DAYS[day], DAYS[(day + 1) % 7]
    they_, friend_they_ = they.capitalize(), friend_they.capitalize()
    opening = draw.choice(
        (
            f"{name} is a {trade.worker} and works in the {trade.position}.",
            f"Every {today} {name} the {trade.worker} goes to the {trade.position}.",
            f"In {season} the {trade.worker} {name} gets up early and walks to the {trade.position}.",
            f"There is a {trade.worker} in our street; {their} name is {name}.",
        )
    )
    middle = [
        f"{they_} takes the {trade.tool} and {trade.makes} the {trade.product} from {trade.material}.",
        f"Without {trade.material} there is no {trade.product}, says the {trade.worker}.",
        f"The {trade.tool} lies beside the {trade.helper} in the {trade.position}.",
        f"{they_} has {number} pieces of {trade.material} and needs a new {trade.tool}.",
        f"It is {season}, the {weather} does not stop, and {name} puts on {their} {wear}.",
        f"In {season} everything looks {colour}, because of the {weather}.",
        f"{their.capitalize()} {animal} {sound} until somebody brings the {food}.",
        f"The {animal} waits at the door of the {trade.position} and {sound}.",
        f"{friend} the {other.worker} comes from the {other.position} to buy a {trade.product}.",
        f"{friend} pays {number} coins for the {trade.product}, and {name} thanks {friend_their} friend.",
        f"{friend_they_} has left {friend_their} {other.tool} in the {other.position}.",
        f"A {other.worker} needs {other.material}, but a {trade.worker} needs {trade.material}.",
        f"When {name} is {feeling}, {they} {deed}.",
        f"Yesterday {they} {trade.made} {number} of them; today the {trade.helper} broke.",
    ]
    ending = draw.choice(
        (
            f"Today is {today}, so tomorrow is {tomorrow}.",
            f"On {tomorrow} {name} will sell the {trade.product} at the market.",
            f"At night the {trade.worker} is {feeling} and {deed}.",
            f"Then {they} closes the {trade.position} and goes home with the {animal}.",
        )
    )
    return opening, middle, ending
