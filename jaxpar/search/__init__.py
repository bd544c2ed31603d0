from jaxpar.search.problem import *
