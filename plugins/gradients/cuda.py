"""stub"""


def forward(call):
    raise NotImplementedError


def backward(dy, dl1, kept, call, *, for_x, for_weights):
    raise NotImplementedError


def shapes_kept(call):
    raise NotImplementedError
