"""Vocabulary of procedural scenes: names, RGB colours, sizes, words of signs."""

from __future__ import annotations

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "orange": (255, 140, 0),
    "yellow": (250, 225, 30),
    "green": (30, 160, 50),
    "cyan": (40, 210, 225),
    "blue": (35, 70, 220),
    "purple": (135, 45, 170),
    "pink": (255, 135, 190),
}
"""Colours of objects, distinct in hue even at 96 x 96 pixels and after video compression."""

BACKGROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (245, 245, 245),
    "grey": (135, 135, 135),
    "black": (15, 15, 15),
    "brown": (95, 62, 35),
}

INK: dict[str, tuple[int, int, int]] = {
    "white": (10, 10, 10),
    "grey": (250, 250, 250),
    "black": (250, 250, 250),
    "brown": (250, 250, 250),
}
"""Colour of a sign's characters on each background."""

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "cross", "diamond", "ring")

SIZES: dict[str, tuple[int, int]] = {"small": (14, 17), "large": (25, 28)}
"""Smallest and largest extent of an object in pixels of a 96 x 96 image."""

GRID = 3
"""Rows and columns of cells in a scene."""

CELL = 32
"""Side of a cell in pixels at scale 1."""

SLOT = 16
"""Side of a character's slot in pixels at scale 1: the patch size of the model."""

SIDE = GRID * CELL
"""Side of a scene's image in pixels at scale 1."""

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

_WORD_LIST = """
ACORN AIR APPLE ARROW ART AUTUMN BAKERY BANANA BANK BAR BEACH BEAR BIKE BIRD BLUE BOAT BOOK BOX BREAD BRIDGE BUS
CAFE CAKE CAMERA CAR CASTLE CAT CHAIR CHESS CITY CLOCK CLOUD COAT COFFEE COLD CORN COW CUP DANCE DANGER DAY DEER
DESK DOG DOOR DRAGON DREAM DRUM DUCK EAGLE EARTH EAST EGG EIGHT ENTER EXIT FARM FAST FIRE FISH FIVE FLAG FLOWER
FOREST FOX FREE FROG FRUIT GAME GARAGE GARDEN GATE GHOST GIFT GLASS GO GOLD GRASS GREEN GUITAR HAND HARBOR HAT HELLO
HELP HILL HOME HONEY HORSE HOTEL HOUSE ICE INK IRON ISLAND JACKET JAM JAZZ JOY JUICE JUMP JUNGLE KEY KING KITE KIWI
LAKE LAMP LEAF LEFT LEMON LIGHT LION LOVE LUCK LUNCH MAGIC MAP MARKET MAZE MELON MILK MIRROR MONEY MOON MOUSE MUSIC
NEST NEW NIGHT NINE NO NORTH NUT OAK OCEAN OFFICE OIL ONE OPEN ORANGE OWL PAPER PARK PARTY PEACE PEAR PEN PHOTO
PIANO PILOT PIZZA PLANE PLANET POLICE POND QUEEN QUIET QUIZ RADIO RAIN RED RICE RIGHT RING RIVER ROAD ROBOT ROCK
ROCKET ROOF ROOM ROSE SALE SALT SAND SCHOOL SEA SEVEN SHIP SHOE SHOP SIGN SILVER SING SIX SKY SLOW SNOW SOAP SOUP
SOUTH SPACE SPOON SPRING STAR STONE STOP SUGAR SUMMER SUN TABLE TAXI TEA TEN TENT THREE TICKET TIGER TIME TOWER
TRAIN TREE TRUCK TWO UP VALLEY VAN VIOLIN VOICE WAIT WALK WATCH WATER WAVE WEST WHALE WHEEL WIND WINDOW WINTER WOLF
WOOD WORLD YES YOGA ZEBRA ZERO ZONE ZOO
"""

WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
"""Words for signs; most signs are random letters or a number instead."""

MAX_SIGN = 6
"""Maximum characters of a sign: one per patch column."""
