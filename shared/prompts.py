"""The built-in prompts. The benchmark and the tests use them too: changing one makes published numbers old."""

CHAT_PROMPTS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea, in four lines.",
    "I have two hours in the evening and a kitchen with rice, eggs, onions and a few tomatoes. "
    "Suggest one dish I could cook, and list its steps in order.",
    "Give me five tips for someone who learns to ride a bicycle as an adult.",
    "A train leaves at 9:40 in the morning and arrives at 11:15. Along the way it stands still for ten minutes at a "
    "signal. How long was it moving? Work through it step by step before you give the answer.",
    "My neighbour plays the trumpet every evening until ten. I like the music, but I get up at five to drive a bus and "
    "need the sleep. Write a friendly note I can put into the letter box: it should thank him for the music, say what "
    "the problem is, and propose that he stops at nine on the days before I work.",
]

_PASSAGES = [
    "A lighthouse keeper's day began before sunset. He climbed the stairs with a can of oil, trimmed the wick, "
    "wiped the soot from the glass and wound up the clockwork that turned the lens. The weights of that clockwork "
    "hung in the middle of the tower and sank a little with every turn, and twice in the night he had to wind them "
    "up again. In fog the lamp was of no use, and he rang a bell by hand, one stroke every half minute, for as long"
    " as the fog stayed. In the morning he drew the curtains around the lens, because the sun, shining through it "
    "the wrong way, could set the woodwork on fire. Then he wrote into the log what the wind had done, which ships "
    "had passed, and how much oil was left. Supplies came by boat once a month, if the sea allowed it. When "
    "electric lamps arrived, the oil went first, then the clockwork, then the bell, and at last the keeper.",
    "Bread rises because yeast eats. In warm, wet dough it breaks starch down into sugar, takes the sugar in, and "
    "gives off alcohol and a gas. The gas would escape at once if flour and water were all there was, but kneading "
    "turns the proteins of the wheat into long elastic sheets, and these hold the gas in small bubbles. If the "
    "dough is left in the cold, the yeast slows down while other organisms, which make acids, go on working; so a "
    "dough that has spent a night in the refrigerator tastes of more. In the oven the bubbles grow one last time, "
    "the alcohol boils away, the starch swells and sets, and the crust dries and turns brown. Steam in the first "
    "minutes keeps the outside soft for a while, so that the loaf can stretch before it hardens. A loaf is done "
    "when it sounds hollow from below.",
    "The first maps of the ocean floor were made with a rope. A sailor let a lead weight run down until it touched "
    "the ground, counted the marks on the rope as he pulled it up, and wrote one number on the chart. In deep water"
    " that took hours, so there were few numbers, and between them people imagined a flat, quiet plain. Then ships "
    "began to send sound down and to time the echo. The numbers came by the thousand, and the plain turned out to "
    "have mountain chains longer than any on land, with a valley along the middle of each. Two people drew these "
    "soundings by hand, line after line, and one of them noticed that earthquakes lay exactly along the valleys. "
    "The floor was not quiet: it was tearing apart there, and new ground came up from below. It took ten years "
    "until most of their colleagues believed it, and today every schoolbook has that picture.",
    "A library that lends books has a problem of space that is older than computers. If every reader reserves a "
    "whole shelf for the books he may want some day, most of the shelves stand empty and the library turns people "
    "away. One librarian therefore cut the shelves into small boxes of the same size. A reader gets one box, and a "
    "second one only when the first is full; the boxes need not stand beside each other, because a card says in "
    "which order to look into them. When a reader leaves, his boxes go back to the heap and the next reader may get"
    " them at once. What is wasted is at most a part of the last box of each reader. The price is the card: whoever"
    " looks for a book has to read the card first, then walk to the box. If the helper walks to each box anew for "
    "every single book, the readers wait; if he reads the whole card once and takes all the boxes on one cart, they"
    " hardly notice.",
]

MIXED_PROMPTS = [
    "Say hello.",
    f"Summarise this text in one sentence.\n\n{_PASSAGES[0]}",
    "What is seven times eight?",
    f"List the main points of this text.\n\n{_PASSAGES[1]}",
    "Name an animal that can fly.",
    f"What is the most surprising fact in this text?\n\n{_PASSAGES[2]}",
    "Which day comes after Monday?",
    f"Explain this text to a child.\n\n{_PASSAGES[3]}",
]
