"""What the demo's model reads: one long text with a question, and what people say in several conversations."""

from dataclasses import dataclass
from typing import Final

__all__ = ["CONVERSATIONS", "QUESTION", "STORY", "Conversation"]

STORY: Final = """\
The town of Lower Marsh has two libraries, and for a hundred years nobody has been able to explain to visitors why \
it needs both. The small one stands on the market square. It has one room, a stove, two long tables and shelves for \
exactly nine hundred books, and anything on those shelves can be in a reader's hands before the kettle boils. The \
large one is a former grain store on the hill behind the river. It holds forty thousand books, it is dry and safe, \
and to fetch something from it a porter has to walk down to the bridge, over the water, and up a path that is \
slippery from October to April. A reader who wants a book from the hill waits for about half an hour.

The two houses were not planned. The room on the square came first, as a gift from a brewer who liked to read in \
company. Within three years it was full, and the town did what towns do: it made a rule. When a new book arrived and \
no shelf was free, the librarian took down the book that had been left alone for the longest time and sold it. The \
rule was fair and simple, and it was a disaster. The very next week the schoolmaster would ask for the atlas that \
had just been sold, and because an atlas was not easy to find, the town had to order it again from the capital, at \
full price, and the schoolmaster waited until spring.

It was the daughter of the first librarian, Agnes Holm, who asked the question that changed everything. Why, she \
wanted to know, do we sell a book in order to make room, when there is an empty grain store on the hill? A book on \
the hill is slow, but it is not lost. Half an hour of walking is a nuisance; ordering from the capital is a season. \
She measured both for a year, with a notebook and her father's watch, and she showed the council that fetching a \
book from the hill was twenty times faster than getting it again, and that most of the books that had been sold were \
asked for again within a month. The council gave her the grain store, a porter, and a lamp.

Then the real work began, because two houses are harder to keep in order than one. Agnes wrote down what she \
learned, and her pages still hang in the office. The first page says that the catalogue must name the place of every \
book, and that there must be only one catalogue. In the first winter there had been two, one in each house, and they \
disagreed so often that the porter crossed the river for books that were lying on the square. The second page says \
that a book must be promised to a reader at the moment in which it is found. If you look first and promise later, \
somebody else will have taken it while you were writing the slip, and then you have a reader with a promise and no \
book.

The third page is about copies. When a book on the square is read by many, Agnes had a second copy made and sent up \
the hill before anybody asked for it, on a quiet afternoon, so that when the shelf was needed the copy below could \
simply be removed. Her porter liked this rule best, since it meant that he never had to carry a heavy load up the \
hill while an impatient reader was standing at the counter. The fourth page is shorter. It says that a shelf that \
has been cleared for a book on its way down belongs to the porter, not to the reader who asked for it. Readers \
change their minds, go home, or are called away in the middle of a sentence; but the porter is already on the bridge \
with his arms full, and if the shelf has been given to someone else he will have nowhere to put the book down.

The last page was added much later, after the great flood, when the bridge was closed for nine days and half of the \
orders were in the wrong house. It says: count everything, and let the numbers add up. Each evening the librarian \
writes three numbers, the books that were read from the square, the books that were carried down from the hill, and \
the books that had to be ordered from the capital, and the three must be equal to the number of requests of that \
day. If they are not equal, something has been forgotten, and it is better to look for it tonight than to explain it \
next year.

Visitors are told all this by a volunteer, usually on the bridge, with the wind in their ears. Most of them nod and \
ask whether it would not be easier to build one large house on the square. It would, says the volunteer, but the \
square is small, and stone is expensive, and the hill was free. And then, if the weather is good, everybody walks up \
the path to see the forty thousand books, which smell faintly of barley."""

QUESTION: Final = "In two sentences: why does the town keep a second library on the hill?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What one person says, turn by turn, whatever the model answers."""

    turns: tuple[str, ...]


CONVERSATIONS: Final = (
    Conversation(
        turns=(
            "I have inherited my grandmother's garden. It is about ten metres long, shaded by a walnut tree in the "
            "afternoon, and the soil is heavy clay that turns to brick in August. I would like to grow vegetables for "
            "two people without spending every weekend on my knees. Here is what I know so far: the last frost is "
            "usually in the second week of May, there is a rain barrel of two hundred litres behind the shed, slugs "
            "ate everything that my grandmother planted along the fence, and the compost heap has not been turned for "
            "at least three years. I own a spade, a rake with two missing teeth, and a wheelbarrow. I do not want to "
            "spend more than a hundred euros in the first year. What should I plant first?",
            "The neighbour says that nothing grows near a walnut tree. Is that true, and what can I do about it?",
            "Give me a plan for the first month, please, one line per week.",
        )
    ),
    Conversation(
        turns=(
            "Our school is going to the mountains for five days with twenty-two children between nine and eleven "
            "years. We sleep in a hut at 1,600 metres, we cook for ourselves, and there is no telephone signal in the "
            "valley. I am the teacher responsible for food. The kitchen has a wood stove with two rings, one very "
            "large pot, a cold cellar, and running water that must be boiled before drinking. We carry everything for "
            "the last two kilometres on our backs, so tins are out of the question. On the second day we walk for six "
            "hours, and on the fourth day we only play around the hut. I may spend nine euros per child and day. How "
            "do I plan the meals?",
            "Two children do not eat meat and one is allergic to nuts. What changes?",
            "What is the one thing that teachers forget most often on such a trip?",
        )
    ),
    Conversation(
        turns=(
            "I repair old radios as a hobby. Yesterday I bought a set from 1954 with a wooden case, four valves and a "
            "cloth-covered loudspeaker. When I switch it on there is a loud hum, no stations, and after a minute it "
            "smells warm. I have a multimeter and some patience. The case was opened before: somebody has replaced "
            "the mains cable and left a piece of tape inside. Three of the valves glow, the fourth stays dark, and "
            "the big transformer is warm but not hot. The dial cord is broken, which I can repair. The seller said "
            "that the set played perfectly until he moved to a smaller flat in spring, but he also said that about "
            "the washing machine. Where do I begin?",
            "I found a capacitor that is bulging at one end. Can I replace it with a modern one?",
            "How do I test the radio safely for the first time afterwards?",
        )
    ),
    Conversation(
        turns=(
            "My brother and I want to open a small bakery in a village of nine hundred people. There is a supermarket "
            "six kilometres away that sells bread for very little money, but people say that it tastes of nothing. We "
            "have savings for about one year. I am a trained baker and my brother has kept the books of a garage for "
            "eleven years. We could rent the old post office, which has a good floor and a bad roof, for four hundred "
            "euros a month. An oven would cost us eighteen thousand, used. The village has a school, a small factory "
            "with sixty workers, and a road on which many people drive to the city between six and seven in the "
            "morning. How can we find out whether the bakery would survive?",
            "Which three numbers should we look at every week once it is open?",
            "Suppose that sales fall in January. What would you do before giving up?",
        )
    ),
    Conversation(
        turns=(
            "I am learning to swim at the age of fifty-three. I can float, and I can do ten metres of breaststroke "
            "before I run out of breath. My teacher is kind but speaks very quickly. I go to the pool twice a week "
            "for forty minutes. I am not afraid of the water, but I get cramps in my left foot, and I cannot open my "
            "eyes without goggles. The pool is twenty-five metres long and the lane for slow swimmers is usually full "
            "of people who talk. At home I have a bathtub, a bicycle that I ride to work, and a daughter who swims "
            "like a fish and has no patience at all. My goal is to cross our small lake, which is three hundred "
            "metres wide, next summer. How should I use that time?",
            "I always swallow water when I breathe in. What am I doing wrong?",
            "How will I know that I am ready to swim in the lake?",
        )
    ),
    Conversation(
        turns=(
            "The choir that I sing in has forty members, a cold church, and one concert every December. Last year "
            "half of the audience left in the interval, because the pieces were long and nobody understood the words. "
            "Our conductor has asked me to write the programme this time. We have a good organ, a bad piano, a "
            "cellist who plays for nothing if she may choose one piece, and about fifteen singers who can hold a solo "
            "line. The audience is between eight and ninety years old, most of them know the old carols by heart, and "
            "the mayor always comes and always falls asleep. The concert may last for seventy minutes. The heating is "
            "switched off when the doors are opened. How can I keep people in their seats?",
            "Should the texts be printed in translation, or read aloud before each piece?",
            "Write the first sentence of the programme for me.",
        )
    ),
    Conversation(
        turns=(
            "We have adopted a dog from a shelter. She is about four years old, medium sized, and afraid of bicycles, "
            "men with hats and the noise of the dishwasher. At home she sleeps under the table and does not want to "
            "go out in the evening. We both work until four. The shelter told us that she lived in a yard for her "
            "first years and had two litters of puppies. She eats well, walks nicely on the leash in the morning, and "
            "is gentle with our neighbour's cat. We live on the second floor of a house with a park on one side and a "
            "busy street on the other. There are no children in the house, but my nephew, who is six and loud, visits "
            "us every second Sunday. What are the first steps?",
            "She barked at a cyclist today and then hid behind me. How should I have reacted?",
            "When is it time to ask a professional for help?",
        )
    ),
    Conversation(
        turns=(
            "I am writing a letter to my future self that will be opened in twenty years. I am thirty, I live in a "
            "harbour town, I mend fishing nets in winter and guide tourists in summer, and I do not know whether "
            "either job will still exist. I want the letter to be honest and not too sad. What I want to keep: the "
            "smell of tar in the harbour in March, the jokes of old Piet who taught me to splice, the name of the "
            "girl who asked me whether fish can be homesick, and the fact that I was happy on most days without "
            "noticing it. What I want to leave out: money, the quarrel with my cousin, and any kind of advice. The "
            "envelope is small, so one page has to be enough. How could it start?",
            "What should I ask my future self?",
            "Please end the letter for me in one sentence.",
        )
    ),
)
